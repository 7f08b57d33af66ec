"""Weights from files, a user's own .safetensors or .pth among them, without running anything that a file says."""

from pathlib import Path

import torch
from torch import Tensor, nn

from lam.files import read_tensors

_ADVICE = "save them with torch.save(network.state_dict(), path) or as safetensors"


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Fill a network with the weights of a file.

    Args:
        network: whose weights are replaced.
        path: a .safetensors file, or what torch saved of a state_dict, alone or under the key `state_dict`.

    Raises:
        ValueError: for a file that is missing, damaged or holds more than plain tensors, or tensors that are not those
            of the network, naming them.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"checkpoint {path} is a folder: give a file of weights, such as "
            "RUN/encoder/generation-.../network.safetensors of a run"
        )
    if not path.is_file():
        raise ValueError(f"checkpoint {path} does not exist")
    state = read_weights(path)
    if any(name.startswith("last/network/") for name in state):
        raise ValueError(
            f"checkpoint {path} is of an unfinished training, which `lam run` on its own folder continues: give the "
            "weights of a network"
        )
    try:
        check_state(network, state)
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from None
    network.load_state_dict(state)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the plain tensors of a file; errors as of `load_weights`."""
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged or hostile file raises has no common class
        raise ValueError(f"checkpoint {path} holds no plain weights ({type(error).__name__}): {_ADVICE}") from None
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"checkpoint {path} holds no state_dict of tensors: {_ADVICE}")
    return state


def check_state(network: nn.Module, state: dict[str, Tensor]) -> None:
    """Refuse a network that the saved tensors do not fit.

    Raises:
        ValueError: naming the first tensors that are missing, left over, or of another shape or type.
    """
    own = network.state_dict()
    problems = [f"{name} is missing in the network" for name in state if name not in own]
    problems += [f"{name} is missing in the file" for name in own if name not in state]
    for name in own.keys() & state.keys():
        if own[name].shape != state[name].shape:
            problems.append(
                f"{name} is {tuple(own[name].shape)} in the network, {tuple(state[name].shape)} in the file"
            )
        elif torch.is_floating_point(own[name]) != torch.is_floating_point(state[name]):
            problems.append(f"{name} is {own[name].dtype} in the network, {state[name].dtype} in the file")
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the network is not the one that was saved: {shown}{more}")

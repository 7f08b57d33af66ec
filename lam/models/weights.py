"""Weights from files, such as a user's .safetensors or .pth, without running code in a file."""

import argparse
import hashlib
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lam.utils.files import read_tensors

_ADVICE = "save them with torch.save(network.state_dict(), path) or as safetensors"
_STATES = (
    *("state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher"),
    *("state_dict", "model_state_dict", "model", "network", "net", "student"),
)
"""Keys under which training scripts save a state_dict, averaged weights first."""
_WRAPPERS = {
    **dict.fromkeys(("DataParallel", "DistributedDataParallel", "_FabricModule", "AveragedModel"), "module"),
    "OptimizedModule": "_orig_mod",
}
"""Attribute of the inner network, by the name of the wrapper's class."""


def load_weights(
    network: nn.Module, path: str | Path, *, classifier: Sequence[str] = (), source: str = "checkpoint"
) -> None:
    """Fill a network with the weights of a file.

    Names in the file may have a prefix, such as `model.`. If the file has averaged weights (EMA, or a teacher), they
    are loaded. A warning names the tensors that are left out.

    Args:
        network: the network.
        path: a .safetensors file, or a file of torch that holds a state_dict, possibly under a key such as "model".
        classifier: paths of layers that the file may hold, but the network does not have.
        source: word for the file in errors.

    Raises:
        ValueError: for a file that is missing, damaged, or holds more than plain tensors; or for tensors that differ
            from the network's, such as tensors of torchvision or timm, which lack lam's head.
    """
    saved = read_weights(Path(path))
    if any(name.startswith("last/network/") for name in saved):
        raise ValueError(
            f"checkpoint {path} is from an unfinished training: give the weights of a network, or continue with "
            "`lam run` on its folder"
        )
    state, own = by_plain_name(saved), by_plain_name(network.state_dict())
    counters = {name: value for name, value in own.items() if name.endswith(".num_batches_tracked")}
    bare = {name.removeprefix("features.") for name in own.keys() - counters.keys() if name.startswith("features.")}
    if "head.weight" in own and 2 * len(bare & state.keys()) > len(bare):
        raise ValueError(
            f"{source} {path} holds only the features of the network, without its head: train a head on them, with "
            f"--network.weights={path} instead of --checkpoint (in Python, give models.build weights={str(path)!r})"
        )
    prefix = _prefix(state, own.keys() - counters.keys(), f"{source} {path}")
    tops = {name.split(".")[0] for name in own}
    inside = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    taken = {
        name: value
        for name, value in inside.items()
        if name in own or (name.split(".")[0] in tops and not _is_under(name, classifier))
    }
    left_out = Counter(
        name.rpartition(".")[0] if _is_under(name.removeprefix(prefix), classifier) else name.split(".")[0]
        for name in state
        if not (name.startswith(prefix) and name.removeprefix(prefix) in taken)
    )
    load_state(network, counters | taken, source=f"{source} {path}: ")  # old torch saved no counters
    if left_out:
        listed = ", ".join(f"{name} ({count} tensors)" for name, count in sorted(left_out.items())[:8])
        more = f" and {len(left_out) - 8} more" if len(left_out) > 8 else ""
        under = f"took the weights under {prefix.rstrip('.')!r}, " if prefix else ""
        warnings.warn(f"{source} {path}: {under}left out {listed}{more}", stacklevel=2)


def _prefix(state: Iterable[str], needed: Iterable[str], source: str) -> str:
    """Prefix of a network's names in a file; if the file holds several networks, the prefix of averaged weights."""
    names, needed = set(state), set(needed)
    if not needed:
        return ""
    anchor = max(needed, key=lambda name: (name.count("."), name))
    prefixes = {"", *(name.removesuffix(anchor) for name in names if name.endswith(f".{anchor}"))}
    found = {prefix: sum(prefix + name in names for name in needed) for prefix in prefixes}
    best = [prefix for prefix in sorted(prefixes) if found[prefix] == max(found.values())]
    averaged = [prefix for prefix in best if any(word in prefix.lower() for word in ("ema", "teacher"))]
    if len(best) > 1 and len(averaged) != 1 and max(found.values()) == len(needed):
        listed = ", ".join(repr(prefix.rstrip(".")) for prefix in best)
        raise ValueError(f"{source} holds several networks, under {listed}: save the state_dict of only one")
    return (averaged or best)[0]


def _is_under(name: str, paths: Sequence[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


def check_is_file(path: str | Path) -> None:
    """Reject a path of weights that does not exist or is a folder."""
    if Path(path).is_dir():
        raise ValueError(
            f"checkpoint {path} is a folder: give a file of weights, such as "
            "RUN/encoder/generation-.../network.safetensors of a run"
        )
    if not Path(path).is_file():
        raise ValueError(f"checkpoint {path} does not exist")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The plain tensors of a file; errors as in `load_weights`."""
    check_is_file(path)
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm and other libraries save options, too
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # errors of a damaged or hostile file have no common class
        raise ValueError(f"checkpoint {path} holds no plain weights ({type(error).__name__}): {_ADVICE}") from None
    if _is_state(saved):
        return saved
    states = {key: saved[key] for key in _STATES if isinstance(saved, dict) and _is_state(saved.get(key))}
    if not states:
        raise ValueError(f"checkpoint {path} holds no state_dict of tensors: {_ADVICE}")
    key, *others = states
    if others:
        warnings.warn(f"checkpoint {path}: took {key!r}, left out {', '.join(map(repr, others))}", stacklevel=2)
    return states[key]


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(each, Tensor) for each in value.values())


def load_state(network: nn.Module, state: dict[str, Tensor], *, with_types: bool = False, source: str = "") -> None:
    """Fill a network with saved tensors; names are compared as in `plain_names`.

    With `with_types`, the network's tensors get the types of the saved tensors.

    Raises:
        ValueError: for tensors that are missing, left over, or of another shape or type, or a network on the meta
            device or with lazy layers.
    """
    own = network.state_dict()
    if empty := [name for name, value in own.items() if is_lazy(value) or value.is_meta]:
        raise ValueError(
            f"{source}the network has no memory for {empty[0]}: build it on another device than meta, or call "
            'network.to_empty(device="cpu"); run a network with lazy layers on a batch first'
        )
    check_state(own, state, source=source)
    saved = by_plain_name(state)
    tensors = {name: saved[plain] for name, plain in plain_names(own).items()}
    if with_types:
        parameters, buffers = (of(remove_duplicate=False) for of in (network.named_parameters, network.named_buffers))
        for name, tensor in (*parameters, *buffers):
            if name in tensors:  # buffers outside the state stay unchanged
                tensor.data = tensor.data.to(tensors[name].dtype)
    network.load_state_dict(with_versions(network, tensors))


def with_versions(module: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Tensors for `module.load_state_dict`, with the versions of its layers: torchvision's MNASNet requires them."""
    state: Any = OrderedDict(tensors)
    state._metadata = getattr(module.state_dict(), "_metadata", {})
    return state


def check_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor], *, source: str = "") -> None:
    """Compare a network's tensors with saved ones by name, shape and type; errors as in `load_state`."""
    names, state = {plain: name for name, plain in plain_names(own).items()}, by_plain_name(state)
    problems = [f"{plain} is missing in the network" for plain in state.keys() - names.keys()]
    problems += [f"{names[plain]} is missing in the file" for plain in names.keys() - state.keys()]
    for plain in names.keys() & state.keys():
        name, value, saved = names[plain], own[names[plain]], state[plain]
        if value.shape != saved.shape:
            problems.append(f"{name} is {tuple(value.shape)} in the network, {tuple(saved.shape)} in the file")
        elif torch.is_floating_point(value) != torch.is_floating_point(saved):
            problems.append(f"{name} is {value.dtype} in the network, {saved.dtype} in the file")
    if problems:
        first = "; ".join(sorted(problems)[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{source}the network differs from the saved one: {first}{more}")


def check_tensors(network: nn.Module) -> None:
    """Reject a network whose state_dict holds anything but tensors, which no file of lam can hold."""
    for name, value in network.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"the network's state_dict must hold only tensors, got {type(value).__name__} at {name!r}: leave "
                "get_extra_state and quantised layers out of the network"
            )


def sha256_of_weights(network: nn.Module) -> str:
    """SHA-256 over names and bytes of all weights and buffers of a network, in hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def unwrapped(network: nn.Module, *, compiled: bool = True) -> nn.Module:
    """The network inside wrappers of parallel training, averaging, Fabric and, with `compiled`, `torch.compile`."""
    while (inner := _WRAPPERS.get(type(network).__name__)) and (compiled or inner == "module"):
        network = network.get_submodule(inner)
    return network


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name of a network's tensors to the name without the prefixes of wrappers.

    `torch.compile` puts `_orig_mod` before the names of its module; parallel training puts `module` before all names.

    Example:
        >>> plain_names(["module.body.weight", "module.head._orig_mod.weight"])
        {'module.body.weight': 'body.weight', 'module.head._orig_mod.weight': 'head.weight'}
    """
    parts = {name: [part for part in name.split(".") if part != "_orig_mod"] for name in names}
    while parts and all(part[0] == "module" and len(part) > 1 for part in parts.values()):
        parts = {name: part[1:] for name, part in parts.items()}
    return {name: ".".join(part) for name, part in parts.items()}


def by_plain_name(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names without the prefixes of wrappers; see `plain_names`."""
    return {plain: state[name] for name, plain in plain_names(state).items()}


def plain_path(network: nn.Module, path: str) -> str:
    """Path of a layer without the prefixes of wrappers; the path of a layer without tensors does not change."""
    prefix = f"{path}." if path else ""
    names = plain_names(network.state_dict())
    inside = next((name for name in names if name.startswith(prefix)), None)
    return path if inside is None else names[inside].removesuffix(inside.removeprefix(prefix)).rstrip(".")


def own_path(network: nn.Module, plain: str) -> str:
    """Inverse of `plain_path`: the path of a linear layer in `network`; `plain` if no linear layer has this path."""
    linear = (path for path, module in network.named_modules() if isinstance(module, nn.Linear))
    return next((path for path in linear if plain_path(network, path) == plain), plain)

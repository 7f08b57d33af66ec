"""An encoder as a folder: a sealed generation of safetensors and JSON, nothing pickled.

encoder.json             format, head, settings of the posterior, recipe of the network, preprocessing
posterior.safetensors    weight, bias, and the sums of the curvature
network.safetensors      the state of the network, where there is one
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lam.files import (
    CorruptFileError,
    read_generation,
    read_json,
    read_tensors,
    write_generation,
    write_json,
    write_tensors,
)
from lam.hessians.diagonal import Diagonal
from lam.posterior import LastLayerPosterior

FORMAT = 1
METADATA, POSTERIOR, NETWORK = "encoder.json", "posterior.safetensors", "network.safetensors"


@dataclass(frozen=True)
class SavedEncoder:
    """What a folder holds."""

    network: nn.Module | None
    head: str
    posterior: LastLayerPosterior
    relation: dict[str, Any]
    preprocessing: dict[str, Any] | None
    tuning: dict[str, Any] | None


def save(
    folder: str | Path,
    *,
    network: nn.Module | None,
    head: str,
    posterior: LastLayerPosterior,
    relation: dict[str, Any],
    preprocessing: dict[str, Any] | None,
    tuning: dict[str, Any] | None,
) -> None:
    """Write an encoder; a crash leaves what was there before, or all of this."""
    curvature = posterior.curvature
    metadata = {
        "format": FORMAT,
        "head": head,
        "has_network": network is not None,
        "recipe": getattr(network, "recipe", None) or None,
        "relation": relation,
        "preprocessing": preprocessing,
        "tuning": tuning,
        "posterior": {
            "n_items": posterior.n_items,
            "prior_precision": posterior.prior_precision,
            "likelihood_scale": posterior.likelihood_scale,
            "seed": posterior.seed,
        },
        "curvature": {
            "n_positives": curvature.n_positives,
            "n_negatives": curvature.n_negatives,
            "has_bias": curvature.has_bias,
            "margin": curvature.margin,
            "split": curvature.split,
            "fix": curvature.fix,
            "negative_weight": curvature.negative_weight,
        },
    }
    tensors = {"weight": posterior.weight, "positive": curvature.positive, "negative": curvature.negative}
    if posterior.bias is not None:
        tensors["bias"] = posterior.bias

    def write(generation: Path) -> None:
        write_json(generation / METADATA, metadata)
        write_tensors(generation / POSTERIOR, tensors)
        if network is not None:
            state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
            write_tensors(generation / NETWORK, state)

    write_generation(folder, write)


def load(folder: str | Path, network: nn.Module | None) -> SavedEncoder:
    """Read an encoder, checked before anything is parsed; see `lam.load`."""
    generation = read_generation(folder, [METADATA, POSTERIOR])
    metadata = read_json(generation / METADATA)
    if metadata["format"] != FORMAT:
        raise ValueError(f"{generation / METADATA} has format {metadata['format']}, this version of lam reads {FORMAT}")
    tensors = read_tensors(generation / POSTERIOR)
    curvature = Diagonal(tensors["positive"], tensors["negative"], **metadata["curvature"])
    posterior = LastLayerPosterior(tensors["weight"], tensors.get("bias"), curvature, **metadata["posterior"])
    if metadata["has_network"]:
        network = _network(generation, metadata["recipe"], network)
    elif network is not None:
        raise ValueError(f"{folder} was saved without a network: load it without one")
    return SavedEncoder(
        network, metadata["head"], posterior, metadata["relation"], metadata["preprocessing"], metadata["tuning"]
    )


def _network(generation: Path, recipe: dict[str, Any] | None, network: nn.Module | None) -> nn.Module:
    if not (generation / NETWORK).is_file():
        raise CorruptFileError(f"{generation / NETWORK} is missing")
    if network is None:
        if recipe is None:
            raise ValueError(
                f"{generation.parent} holds a network that lam cannot rebuild by name: pass one of the same "
                "architecture, lam.load(folder, network)"
            )
        from lam.models import build

        network = build(**recipe)
    state = read_tensors(generation / NETWORK)
    check_state(network, state)
    network.load_state_dict(state)
    return network.eval()


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

"""An encoder as a folder (safetensors and JSON with hashes, no pickle), and as one `torch.export` program.

The folder holds:

encoder.json             format, kind, head, settings of the kind, recipe of the network, preprocessing
posterior.safetensors    tensors outside the network, such as weight, bias, sums of the curvature, eigenvectors
network.safetensors      state of the network, if any, by names without the prefixes of wrappers
ambiguity.safetensors    tensors of `learn_ambiguity`, if it was called
"""

import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.models.head import ADDED, head_input_and_output
from lam.models.modes import evaluating
from lam.models.weights import check_tensors, load_state, own_path, plain_names, plain_path
from lam.posteriors.base import Predictor
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_tensor
from lam.utils.files import (
    MANIFEST,
    CorruptFileError,
    FolderFormat,
    read_generation,
    read_json,
    read_shapes,
    read_tensors,
    write_atomically,
    write_generation,
    write_tensors,
)

FORMAT = FolderFormat(6, "encoder.json", ("posterior.safetensors",), optional=("ambiguity.safetensors",))
NETWORK = "network.safetensors"
"""State of the network; shapes are compared with the network's before tensors are read."""

MOST_SAMPLES = 1_000_000
_TYPES = {"kind": str, "head": str, "relation": dict, "n_samples": int, "settings": dict, "trained_on": list}


@dataclass(frozen=True)
class SavedEncoder:
    """The contents of an encoder's folder: constructor arguments as JSON, network with weights, and tensors.

    Attributes:
        kind: name of the class for `lam.load`.
        settings, tensors: `Encoder.settings` and `Encoder.tensors`.
        ambiguity: tensors of `Encoder.learn_ambiguity`, if it was called.
    """

    kind: str
    network: nn.Module | None
    head: str
    relation: dict[str, Any]
    preprocessing: dict[str, Any] | None
    ood_score: Any
    n_samples: int
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    trained_on: list[int] = field(default_factory=list)
    ambiguity: dict[str, Tensor] | None = None


def fingerprint(folder: str | Path) -> str:
    """SHA-256 over the hashes of an encoder's files; identifies network, posterior and preprocessing.

    The name of the files' sub-folder, which changes with each `save`, has no effect.
    """
    folder = Path(folder)
    read_generation(folder)
    hashes = read_json(folder / MANIFEST)["sha256"]
    lines = sorted(f"{Path(name).name} {digest}" for name, digest in hashes.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def save(folder: str | Path, encoder: SavedEncoder) -> None:
    """Write an encoder; after a crash the folder holds the old encoder or the new one."""
    network = encoder.network
    if network is not None:
        check_tensors(network)
    plain = {name: value for name, value in vars(encoder).items() if name not in ("network", "tensors", "ambiguity")}
    metadata = {**plain, "has_network": network is not None, "recipe": _recipe(network)}
    if network is not None:
        metadata["head"] = plain_path(_member(network), encoder.head)
    state = {} if network is None else network.state_dict()
    weights = {plain: state[name].clone() for name, plain in plain_names(state).items()}

    def write(generation: Path) -> None:
        FORMAT.write_files(generation, metadata, encoder.tensors, encoder.ambiguity)
        if network is not None:
            write_tensors(generation / NETWORK, weights)

    write_generation(folder, write)


def load(folder: str | Path, network: nn.Module | None) -> SavedEncoder:
    """Check the hashes of an encoder's files, then read them; see `lam.load`."""
    return FORMAT.read(folder, lambda generation: _load(folder, generation, network))


def _load(folder: str | Path, generation: Path, network: nn.Module | None) -> SavedEncoder:
    metadata, tensors, ambiguity = FORMAT.read_files(generation)
    has_network, recipe = metadata.pop("has_network"), metadata.pop("recipe")
    _check_types(generation / FORMAT.record, metadata)
    if has_network:
        network = _network(generation, recipe, network)
        metadata["head"] = own_path(_member(network), metadata["head"])
        if metadata["head"] != ADDED:
            _member(network).get_submodule(metadata["head"])  # raises if the network has no such layer
    elif network is not None:
        raise ValueError(f"{folder} was saved without a network: load it without one")
    return SavedEncoder(network=network, tensors=tensors, ambiguity=ambiguity, **metadata)


def _check_types(file: Path, metadata: dict[str, Any]) -> None:
    for name, kind in _TYPES.items():
        if not isinstance(metadata.get(name), kind) or isinstance(metadata[name], bool):
            raise ValueError(f"{file}: {name} must be {kind.__name__}, got {metadata.get(name)!r:.80}")
    if not 2 <= metadata["n_samples"] <= MOST_SAMPLES:
        raise ValueError(f"{file}: n_samples must be from 2 to {MOST_SAMPLES:,}, got {metadata['n_samples']}")
    if not all(type(value) is int for value in metadata["trained_on"]):
        raise ValueError(f"{file}: trained_on must be integers")


def _member(network: nn.Module) -> nn.Module:
    """The network that a head's path refers to: the first member of an ensemble."""
    return network[0] if isinstance(network, nn.ModuleList) else network


def _recipe(network: nn.Module | None) -> Any:
    """Arguments of `lam.models.build`, a list for an ensemble; None if lam cannot build the network."""
    if isinstance(network, nn.ModuleList):
        recipes = [_recipe(member) for member in network]
        return recipes if all(recipes) else None
    return getattr(network, "recipe", None) or None


def _network(generation: Path, recipe: Any, network: nn.Module | None) -> nn.Module:
    if not (generation / NETWORK).is_file():
        raise CorruptFileError(f"{generation / NETWORK} is missing")
    if network is None:
        if recipe is None:
            raise ValueError(
                f"{generation.parent} holds a network that lam cannot rebuild by name: pass one of the same "
                "architecture, lam.load(folder, network), or all members of an ensemble, "
                "lam.load(folder, torch.nn.ModuleList(members))"
            )
        from lam.models import rebuild

        shapes = read_shapes(generation / NETWORK)
        if isinstance(recipe, list):
            members: dict[str, dict[str, Tensor]] = {}
            for name, tensor in shapes.items():
                number, _, own = name.partition(".")
                members.setdefault(number, {})[own] = tensor
            if members.keys() != {str(number) for number in range(len(recipe))}:
                raise ValueError(f"{generation.parent} has {len(recipe)} recipes for {len(members)} networks")
            network = nn.ModuleList([rebuild(member, members[str(number)]) for number, member in enumerate(recipe)])
        else:
            network = rebuild(recipe, shapes)
    if isinstance(network, nn.ModuleList) and len(set(network)) < len(network):
        raise ValueError(
            "members must be different networks, got one of them twice, which cannot hold two sets of weights: give "
            "torch.nn.ModuleList([make_network() for _ in range(M)])"
        )
    load_state(network, read_tensors(generation / NETWORK), with_types=True)
    return network.eval()


class _Program(nn.Module):
    """Map inputs to features, mean, κ, variance and, if learned, the parts of κ."""

    def __init__(self, network: nn.Module, head: str, predict: Predictor) -> None:
        super().__init__()
        self.network = network
        self._head, self._predict = head, predict

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        features, output = head_input_and_output(self.network, self._head, inputs)
        embeddings = self._predict(features, None if self._head == ADDED else output)
        features = features.to(torch.promote_types(features.dtype, torch.float32))  # as `Encoder.predict` does
        return features, embeddings.mean, embeddings.kappa, embeddings.variance, *embeddings.parts().values()


def check_example(example: Any) -> None:
    """Require a tensor: a program has one input."""
    if isinstance(example, Mapping):
        names = ", ".join(map(str, example))
        raise ValueError(
            f"example must be a tensor, got named inputs ({names}): a program has one input; fit a module that takes "
            "one tensor and calls the network, and export that encoder"
        )
    check_tensor("example", example)


@without_autocast()  # a program exported under autocast would run only under autocast
def export_encoder(
    path: str | Path, example: Float[Tensor, "N ..."], network: nn.Module, head: str, predict: Predictor
) -> None:
    """Write the program of a network and its head; see `BayesianEncoder.export`.

    `predict` maps features, and the network's output (None for an added head), to embeddings. With an example of N ≥ 2
    items, the program takes batches of any size; fewer items raise a `ValueError`.
    """
    if len(example) < 2:
        raise ValueError(
            f"the example must hold at least 2 inputs, so that the batch size stays free, got {len(example)}"
        )
    program = _Program(network, head, predict)
    with evaluating(program):
        try:
            exported = torch.export.export(program, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        except Exception as error:  # torch's errors have no common class
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(
                f"the network cannot be exported ({reason:.200}): write it without branches on values or a fixed batch "
                "size (x.shape[0] stays free, len(x) does not), or deploy it with lam"
            ) from error
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor")  # torch warns of complete channels_last weights too
        torch.export.save(exported, content)
    write_atomically(path, lambda temporary: temporary.write_bytes(content.getvalue()))

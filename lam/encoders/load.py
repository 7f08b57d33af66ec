"""Encoders by kind, and `load` for encoders of any kind."""

from pathlib import Path

from torch import nn

from lam.encoders import files as encoder_files
from lam.encoders.base import Encoder
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.deterministic import DeterministicEncoder, GaussianEncoder, HeadEncoder, NeighbourEncoder, NormEncoder
from lam.encoders.ensemble import DropoutEncoder, EnsembleEncoder
from lam.encoders.layers import LayersEncoder
from lam.models.weights import unwrapped
from lam.tuning.ambiguity import Ambiguity
from lam.utils.registry import check_class, enter

ENCODERS: dict[str, type[Encoder]] = {
    encoder.kind: encoder
    for encoder in (
        *(BayesianEncoder, LayersEncoder, DeterministicEncoder, NormEncoder, HeadEncoder, NeighbourEncoder),
        *(DropoutEncoder, EnsembleEncoder, GaussianEncoder),
    )
}

_UNREADABLE = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError)
"""Errors that settings of wrong types may raise; a folder is untrusted input."""


def register(kind: str, encoder: type[Encoder]) -> None:
    """Add a class of encoders under a new kind; saved encoders name their kind."""
    check_class("encoder", encoder, Encoder)
    enter(ENCODERS, "kind", kind, encoder)
    encoder.kind = kind


def load(folder: str | Path, network: nn.Module | None = None) -> Encoder:
    """Read an encoder that `Encoder.save` wrote; all tensors are bitwise equal.

    Args:
        folder: folder of the encoder.
        network: a network of the same architecture, if lam cannot rebuild it by name; the saved weights and their types
            replace the network's. Parallel modules and averaged models are unwrapped, as in `lam.fit`.

    Raises:
        CorruptFileError: if a file is missing, truncated or altered; the error names it.
        ValueError: for the folder of a run, a missing network, an unknown kind, or a folder that lam did not write.
            Also for a `network` that is not a module, has other tensors or shapes, or holds an ensemble member twice.
    """
    if not isinstance(network, nn.Module | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"network must be a torch.nn.Module, got {type(network).__name__}: give lam.load(folder, network), or all "
            "members of an ensemble as torch.nn.ModuleList(members)"
        )
    if (of_run := Path(folder) / "encoder").is_dir() and (Path(folder) / "config.yaml").is_file():
        raise ValueError(f"{folder} is a run: give lam.load({str(of_run)!r})")
    try:
        inner = None if network is None else unwrapped(network, compiled=False)  # as `lam.fit` does
        saved = encoder_files.load(folder, inner)
        if saved.kind not in ENCODERS:
            raise ValueError(
                f"{folder} holds an encoder of kind {saved.kind!r}; known kinds are {', '.join(ENCODERS)}: register "
                "others with lam.encoders.load.register"
            )
        encoder = ENCODERS[saved.kind].restored(saved)
        if isinstance(encoder, BayesianEncoder):
            encoder.posterior.log_marginal_likelihood(encoder.posterior.alpha)  # a wrong setting fails here
        if saved.ambiguity is not None:
            encoder.ambiguity, encoder.has_kappa = Ambiguity.restored(saved.ambiguity), True
        return encoder
    except _UNREADABLE as error:
        raise ValueError(f"{folder} holds no encoder that lam wrote ({type(error).__name__}: {error})") from error

"""Encoders by kind, and reading one of any kind from its folder."""

from pathlib import Path

from torch import nn

from lam.encoders import files as encoder_files
from lam.encoders.base import Encoder
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.concentration import HeadEncoder, NeighbourEncoder, NormEncoder
from lam.encoders.deterministic import DeterministicEncoder
from lam.encoders.dropout import DropoutEncoder
from lam.encoders.ensemble import EnsembleEncoder
from lam.encoders.files import SavedEncoder
from lam.encoders.gaussian import GaussianEncoder
from lam.encoders.layers import LayersEncoder
from lam.tuning.ambiguity import Ambiguity
from lam.utils.registry import enter

ENCODERS: dict[str, type[Encoder]] = {
    encoder.kind: encoder
    for encoder in (
        *(BayesianEncoder, LayersEncoder, DeterministicEncoder, NormEncoder, HeadEncoder, NeighbourEncoder),
        *(DropoutEncoder, EnsembleEncoder, GaussianEncoder),
    )
}

_UNREADABLE = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError)
"""What values of other types raise while they are restored; a folder may be anybody's."""


def register(kind: str, encoder: type[Encoder]) -> None:
    """Enter a class of encoders under a kind, which its folders then name.

    Raises:
        ValueError: for a kind that another class has already.
    """
    enter(ENCODERS, "kind", kind, encoder)
    encoder.kind = kind


def load(folder: str | Path, network: nn.Module | None = None) -> Encoder:
    """Read an encoder that `Encoder.save` wrote.

    Args:
        folder: where it was saved.
        network: where lam cannot rebuild it by name: one of the same architecture, whose weights are replaced, and take
            the types that they were saved with.

    Returns:
        The encoder, equal to the one saved, to the bit.

    Raises:
        CorruptFileError: naming the file that is missing, truncated or altered.
        ValueError: where the network is needed and missing, or has other tensors or shapes, naming them; for a kind
            that is not known; or for a folder that lam did not write.
    """
    try:
        return _restored(encoder_files.load(folder, network), folder)
    except _UNREADABLE as error:
        raise ValueError(f"{folder} holds no encoder that lam wrote ({type(error).__name__}: {error})") from error


def _restored(saved: SavedEncoder, folder: str | Path) -> Encoder:
    if saved.kind not in ENCODERS:
        raise ValueError(
            f"{folder} holds an encoder of kind {saved.kind!r}; known are {', '.join(ENCODERS)}: "
            "lam.encoders.load.register makes others known"
        )
    encoder = ENCODERS[saved.kind].restored(saved)
    if isinstance(encoder, BayesianEncoder):
        encoder.posterior.log_marginal_likelihood(encoder.posterior.prior_precision)  # which reads every setting
    if saved.ambiguity is not None:
        encoder.ambiguity, encoder.has_kappa = Ambiguity.restored(saved.ambiguity), True
    return encoder

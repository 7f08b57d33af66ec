"""Reading an encoder of any kind back from its folder."""

from importlib import import_module
from pathlib import Path

from torch import nn

from lam.encoders import files as encoder_files
from lam.encoders.base import Encoder

KINDS = {
    "laplace": ("lam.encoders.bayesian", "BayesianEncoder"),
    "deterministic": ("lam.methods.deterministic", "DeterministicEncoder"),
    "norm": ("lam.methods.norm", "NormEncoder"),
    "knn_distance": ("lam.methods.knn_distance", "NeighbourEncoder"),
    "mc_dropout": ("lam.methods.mc_dropout", "DropoutEncoder"),
    "deep_ensemble": ("lam.methods.deep_ensemble", "EnsembleEncoder"),
    "gaussian": ("lam.encoders.gaussian", "GaussianEncoder"),
}
"""Where the class of each kind is; it is imported when an encoder of that kind is read."""


def load(folder: str | Path, network: nn.Module | None = None) -> Encoder:
    """Read an encoder that `Encoder.save` wrote.

    Args:
        folder: where it was saved.
        network: where lam cannot rebuild it by name: one of the same architecture, whose weights are replaced.

    Returns:
        The encoder, equal to the one saved, to the bit.

    Raises:
        CorruptFileError: naming the file that is missing, truncated or altered.
        ValueError: where the network is needed and missing, or has other tensors or shapes, naming them; or for a kind
            that this version of lam does not know.
    """
    saved = encoder_files.load(folder, network)
    if saved.kind not in KINDS:
        raise ValueError(
            f"{folder} holds an encoder of kind {saved.kind!r}; this version of lam knows {', '.join(KINDS)}"
        )
    module, name = KINDS[saved.kind]
    return getattr(import_module(module), name).restored(saved)

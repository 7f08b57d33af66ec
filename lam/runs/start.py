"""The start of a run from a checkpoint: a file of weights, or another run."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lam.encoders.base import Encoder
from lam.encoders.concentration import HeadEncoder
from lam.models.kappa_head import KappaHead
from lam.models.weights import load_state, load_weights
from lam.runs.finished import Run
from lam.tuning.ambiguity import TrainedHead
from lam.utils.files import read_json, verify

TRAINED_BY = "trained_by.json"


@dataclass(frozen=True)
class Start:
    """The source of a network's weights.

    Attributes:
        trained_by: name and settings of the training loss's curvature; None for a file of weights.
        kappa_head: the κ head beside the weights, if any.
    """

    trained_by: Mapping[str, Any] | None = None
    kappa_head: KappaHead | None = None


def start_from(network: nn.Module, checkpoint: str) -> Start:
    """Fill a network with the weights of a file or a finished run.

    Raises:
        ValueError: as `lam.models.weights.load_weights`, or for a folder that is no finished run, or a run with several
            networks.
        CorruptFileError: naming the file of a run that is missing, truncated or altered.
    """
    if not Path(checkpoint).is_dir():
        load_weights(network, checkpoint)
        return Start()
    run = Run(checkpoint)
    config, trained = run.config, run.encoder.network
    if trained is None or isinstance(trained, nn.ModuleList):
        raise ValueError(f"checkpoint {checkpoint} is a run of {config.method.name} with several networks: give one")
    try:
        load_state(network, dict(trained.state_dict()), source=f"checkpoint {checkpoint}: ")
    except ValueError as error:
        options = {name: value for name, value in asdict(config.network).items() if value}
        settings = " ".join(f"--network.{name}={shlex.quote(str(value))}" for name, value in options.items())
        raise ValueError(f"{error}; the settings of its network are {settings}") from None
    verify(run.folder, [TRAINED_BY], others=False)
    trained_by = read_json(run.folder / TRAINED_BY)
    return Start(trained_by, _kappa_head(run.encoder))


def _kappa_head(encoder: Encoder) -> KappaHead | None:
    """An encoder's κ head: its own, or the one in its learnt ambiguity."""
    if isinstance(encoder, HeadEncoder):
        return encoder.kappa_head
    learnt = encoder.ambiguity
    return learnt.head.kappa_head() if learnt is not None and isinstance(learnt.head, TrainedHead) else None

"""What a run begins with in place of training: a file of weights, or another run with all that it knows of them."""

import shlex
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from lam.datasets import Splits
from lam.encoders.base import Encoder
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.concentration import HeadEncoder
from lam.models.kappa_head import KappaHead
from lam.models.weights import load_state, load_weights
from lam.pairs.relevance import relevance_of
from lam.runs.config import RunConfig
from lam.runs.finished import Run
from lam.training import History
from lam.tuning.ambiguity import TrainedHead, check_enough
from lam.utils.files import read_json, verify, write_json

TRAINED_BY = "trained_by.json"


@dataclass(frozen=True)
class Start:
    """What is known of the weights that a network was filled with.

    Attributes:
        trained_by: name and settings of the curvature of the loss that trained them; None of a file of weights.
        kappa_head: the κ head beside them; None where there is none.
    """

    trained_by: Mapping[str, Any] | None = None
    kappa_head: KappaHead | None = None

    def taken_over(self, config: RunConfig, splits: Splits) -> "Start":
        """It without the κ head where the run's posterior, if there is one, does not take that over.

        Of too few items with a match p_known cannot be learnt: then a warning says so.

        Raises:
            ValueError: where too few have one, and the run is to learn its ambiguity all the same.
        """
        learn, part = config.ambiguity.learn, splits.validation
        is_posterior = issubclass(config.method.encoder, BayesianEncoder)
        start = self if is_posterior and learn is not False else replace(self, kappa_head=None)
        if not learn and start.kappa_head is None:
            return start
        within = config.places.relevant_within
        relation = config.relation_of(part)
        try:
            check_enough(relevance_of(relation, part.targets, is_query=part.is_query, relevant_within=within))
        except ValueError as error:
            if learn:
                raise
            warnings.warn(
                f"the κ head of checkpoint {config.checkpoint} is left out, and κ is the posterior's alone, as p_known "
                f"cannot be learnt on the validation split: {error}, or say so by --ambiguity.learn=false",
                stacklevel=2,
            )
            return replace(start, kappa_head=None)
        return start


def start_from(network: nn.Module, checkpoint: str) -> Start:
    """Fill a network with the weights of a file or of a finished run.

    Raises:
        ValueError: as `lam.models.weights.load_weights`, or for a folder that is no finished run, or is one of several
            networks.
        CorruptFileError: naming the file of a run that is missing, truncated or altered.
    """
    if not Path(checkpoint).is_dir():
        load_weights(network, checkpoint)
        return Start()
    run = Run(checkpoint)
    config, trained = run.config, run.encoder.network
    if trained is None or isinstance(trained, nn.ModuleList):
        raise ValueError(f"checkpoint {checkpoint} is a run of {config.method.name}, which has no single network")
    try:
        load_state(network, dict(trained.state_dict()), source=f"checkpoint {checkpoint}: ")
    except ValueError as error:
        given = {name: value for name, value in asdict(config.network).items() if value}
        settings = " ".join(f"--network.{name}={shlex.quote(str(value))}" for name, value in given.items())
        raise ValueError(f"{error}; the settings of its network are {settings}") from None
    verify(run.folder, [TRAINED_BY], others=False)
    trained_by = read_json(run.folder / TRAINED_BY)
    return Start(trained_by, _kappa_head(run.encoder))


def _kappa_head(encoder: Encoder) -> KappaHead | None:
    """Its own, or that of the run which a posterior started from."""
    if isinstance(encoder, HeadEncoder):
        return encoder.kappa_head
    learnt = encoder.ambiguity
    return learnt.head.kappa_head() if learnt is not None and isinstance(learnt.head, TrainedHead) else None


def write_trained_by(folder: Path, config: RunConfig, start: Start, histories: Mapping[str, History]) -> None:
    """Keep in the folder of a run by the curvature of which loss its network was trained, for runs that start there.

    A run that trained no network hands on what it started with.
    """
    trained_by = start.trained_by
    if trained_by is None or "network" in histories:
        learned = histories["network"].learned if "network" in histories else None
        trained_by = config.method.trained_by(config.loss(), config.network.dimension, learned)
    write_json(folder / TRAINED_BY, trained_by)

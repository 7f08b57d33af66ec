"""`Method`: how a network becomes an encoder, and what all methods share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lam.datasets.augmented import without_augmentation
from lam.encoders.base import Encoder
from lam.encoders.batches import Batch
from lam.encoders.held_out import HeldOut
from lam.encoders.seen import item_hashes, spread
from lam.hessians.losses import CURVATURES, to_settings
from lam.losses import Loss, as_settings, settings_of
from lam.models.head import find_head
from lam.training import History, Step, Training, check_data, device_of
from lam.training import train as train_by_loop

Refit = Callable[["Method"], Encoder]
"""Makes an encoder of a network that is trained already, by a method."""


class Trained(NamedTuple):
    """An encoder, and how its networks were trained.

    Attributes:
        encoder: fitted, in evaluation mode.
        histories: of each training, by name: that of the network is `network`.
    """

    encoder: Encoder
    histories: dict[str, History]


@dataclass(frozen=True)
class Method(ABC):
    """How a network becomes an encoder; the fields of a method are its options, which check themselves.

    Attributes:
        name: its key in `lam.methods.METHODS` and in configurations.
        encoder: the class of its encoders.
        reads_labels: whether labels are needed to train; without, what says which items match is for measuring alone.
        learns_from_matches: whether items that match are needed also where the network has nothing to train.
    """

    name: ClassVar[str] = ""
    encoder: ClassVar[type[Encoder]]
    reads_labels: ClassVar[bool] = True
    learns_from_matches: ClassVar[bool] = True
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    @abstractmethod
    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network, unless that is done already, and make an encoder of it.

        Args:
            network: maps (N, ...) inputs to unit rows (N, D) by a linear layer and normalisation.
            dataset: of (input, label); see `lam.training.train`.
            training: see `lam.training.Training`.

        Raises:
            ValueError: as `check`, `check_start` and `lam.training.train`, or where no linear layer gives the network's
                output.
        """

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Refuse, before any work, what `train` would refuse after some; arguments as there.

        Raises:
            ValueError: for a network, data or a start that the method, as its options are, cannot take.
        """
        self.check_start(pretrained=training.pretrained)
        if not training.pretrained and _can_learn(network):
            check_data(dataset, training)

    def check_start(self, *, pretrained: bool) -> None:  # noqa: B027 - most methods take both
        """Refuse a start from a network that is trained already, or from files that are not there, before any work."""

    @property
    def n_seeds(self) -> int:
        """How many seeds in a row one training takes."""
        return 1

    @property
    def tunes(self) -> bool:
        """Whether there is something that `tune_on` chooses."""
        return False

    def tune_on(  # noqa: B027 - most methods have nothing to tune
        self,
        encoder: Encoder,
        held_out: HeldOut | Iterable[Batch],
        *,
        refit: Refit | None = None,
    ) -> None:
        """Choose what the options leave open, on held-out data; arguments as those of `BayesianEncoder.tune`.

        Args:
            encoder: of `train`.
            held_out: items with labels or positions.
            refit: makes an encoder of the same network and data by another method; None where it cannot be made again.
        """

    def own_loss(self, loss: Loss, dimension: int) -> Loss:
        """The loss that networks of D dimensions are trained by: that of the training, or the method's own."""
        return loss

    def trained_by(
        self, loss: Loss, dimension: int, learned: Mapping[str, Sequence[float]] | None = None
    ) -> dict[str, Any]:
        """Name and settings of the curvature of the loss that networks are trained by; nothing where it has none.

        Where that is a loss of two views of each image, the settings of these come with it, as `views`.

        Args:
            loss: of the training.
            dimension: D of the network.
            learned: what the loss has learned, as a history has it.
        """
        return own_curvature(self.own_loss(loss, dimension), learned)

    def settings(self) -> dict[str, Any]:
        """The name and the options, as a configuration has them."""
        return {"name": self.name, **asdict(self)}

    def trained_network(
        self, network: nn.Module, dataset: Any, training: Training, step: Step | None = None
    ) -> dict[str, History]:
        """Train a network in place; one that is trained already, or has nothing to train, is moved to its device.

        Returns:
            The history under the name `network`; nothing for a network that is trained already.
        """
        self.check_start(pretrained=training.pretrained)
        if training.pretrained or not _can_learn(network):
            network.to(device_of(training.accelerator)).eval()
            return {}
        with training.stage("train"):
            return {"network": train_by_loop(network, dataset, training, step=step, method=self.name)}


def _can_learn(network: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in network.parameters())


def own_curvature(loss: Loss, learned: Mapping[str, Sequence[float]] | None = None) -> dict[str, Any]:
    """Name and settings of the curvature of a loss, with what the loss has learned; those that it lacks are left out.

    Nothing where the curvature cannot be without one of these, such as a margin: it is not that loss's.

    Example:
        >>> from lam.losses import SupCon
        >>> own_curvature(SupCon(0.7, 0.2))
        {'name': 'supcon', 'split': 'logits', 'fix': 'fixed', 'average': True, 'temperature': 0.2}
    """
    known = {**settings_of(loss), **as_settings(learned or {})}
    cls: Any = CURVATURES[loss.curvature]
    given = {field.name: known[field.name] for field in fields(cls) if known.get(field.name) is not None}
    if any(field.default is MISSING and field.name not in given for field in fields(cls)):
        return {}
    curvature = cls(**given)
    return {name: value for name, value in to_settings(curvature).items() if value is not None}


def head_of(network: nn.Module, dataset: Any, head: str | None = None) -> str:
    """Path of a network's head, by the first items of a data set; see `lam.models.head.find_head`."""
    return find_head(network, probe_of(dataset), head)


def probe_of(dataset: Any) -> Tensor:
    """Inputs of the first two items of a data set, not augmented."""
    plain = without_augmentation(dataset)
    return torch.stack([plain[index][0] for index in range(min(2, len(plain)))])


def inputs_of(dataset: Any, training: Training) -> dict[str, Any]:
    """Every encoder's arguments about its inputs: what makes two match, how a file becomes one, some to recognise."""
    plain = without_augmentation(dataset)
    return {
        "relation": training.relation,
        "preprocessing": getattr(dataset, "preprocessing", None),
        "trained_on": item_hashes([plain[index][0] for index in spread(len(plain))]),
    }

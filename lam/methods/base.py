"""`Method`: how a network becomes an encoder; and functions that methods share."""

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from lam.datasets.augmented import without_augmentation
from lam.encoders.base import Encoder
from lam.encoders.batches import Batch, HeldOut, item_hashes, spread
from lam.encoders.deterministic import SeededEncoder
from lam.hessians.last_layer import check_sphere
from lam.hessians.losses import CURVATURES, to_settings
from lam.losses import Loss
from lam.losses.base import as_settings, settings_of
from lam.models.head import find_head
from lam.models.weights import unwrapped
from lam.training import History, Step, Training, check_data, check_items, device_of
from lam.training import train as train_by_loop
from lam.training.batches import Batches, input_and_label

_REFERENCE_BATCH = 250

Learned = Mapping[str, Sequence[float]]
"""Learned parameters of a loss, by name, as in a `History`."""


class Trained(NamedTuple):
    """A fitted encoder and the histories of its trainings.

    Attributes:
        encoder: the encoder, in evaluation mode.
        histories: the history of each training, by name, such as `network`.
    """

    encoder: Encoder
    histories: dict[str, History]


@dataclass(frozen=True)
class Method(ABC):
    """The way from a network to an encoder. The fields are the options of the method; the constructor checks them.

    Attributes:
        name: key of the method in `lam.methods.METHODS` and in configurations.
        encoder: class of the encoders that `train` returns.
        reads_labels: whether training reads labels; evaluation always does.
        learns_from_matches: whether the method needs matching items even if the network has nothing to train.
    """

    name: ClassVar[str] = ""
    encoder: ClassVar[type[Encoder]]
    reads_labels: ClassVar[bool] = True
    learns_from_matches: ClassVar[bool] = True
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "arbitrary_types_allowed": True}

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and return its encoder; with `training.pretrained`, most methods keep the network's weights.

        Args:
            network: maps inputs (N, ...) to unit embeddings (N, D) and ends in a linear layer and normalisation. A
                wrapper, such as torch.compile's, is removed.
            dataset: items (input, label, ...); see `lam.training.train`.
            training: the settings; its `stage` gets the name of each stage, `train` and, for some methods, a second.

        Raises:
            ValueError: as `check`, `check_start` and `lam.training.train`, or for a network that does not end in a
                linear layer.
        """
        network = unwrapped(network)
        self.check(network, dataset, training)
        head = head_of(network, dataset)
        layer: Any = network.get_submodule(head)
        own = replace(training, loss=self.training_loss(training.loss, layer.out_features))
        histories = self.train_network(network, dataset, own)
        rest = self.learn_rest(network, head, dataset, training, histories)
        return Trained(self.encoder_of(network, head, dataset, training, **rest), histories)

    def learn_rest(
        self, network: nn.Module, head: str, dataset: Any, training: Training, histories: dict[str, History]
    ) -> dict[str, Any]:
        """Arguments of the encoder that are learned after the network; adds a further training to `histories`."""
        return {}

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Reject a network, data or start weights that `train` cannot use, before any work; arguments as in `train`."""
        self.check_start(pretrained=training.pretrained)
        if not training.pretrained and can_learn(network):
            check_data(dataset, training)

    def check_start(self, *, pretrained: bool) -> None:  # noqa: B027 - most methods take both
        """Reject missing files, and a trained network if the method cannot start from one."""

    @property
    def n_seeds(self) -> int:
        """Number of consecutive seeds that one training uses."""
        return 1

    @property
    def tunes(self) -> bool:
        """Whether `tune_on` chooses anything."""
        return False

    def tune_on(  # noqa: B027 - most methods have nothing to tune
        self,
        encoder: Encoder,
        held_out: HeldOut | Iterable[Batch],
        *,
        progress: bool = False,
    ) -> None:
        """Choose settings of an encoder on held-out data.

        Args:
            encoder: the encoder that `train` returned.
            held_out: items with labels or positions.
            progress: show progress bars on standard error.
        """

    def training_loss(self, loss: Loss, dimension: int) -> Loss:
        """The loss for networks of D dimensions: the training's `loss`, or the method's own loss."""
        return loss

    def trained_by(self, loss: Loss, dimension: int, learned: Learned | None = None) -> dict[str, Any]:
        """Name and settings of the curvature of the training loss; empty for a loss without a curvature.

        A method that trains on two views of each image adds the settings of the views as `views`.

        Args:
            loss: the training's loss.
            dimension: D of the network.
            learned: learned parameters of the loss.
        """
        return curvature_of_loss(self.training_loss(loss, dimension), learned)

    def settings(self) -> dict[str, Any]:
        """The name and the options, as in a configuration."""
        return {"name": self.name, **asdict(self)}

    def train_network(
        self, network: nn.Module, dataset: Any, training: Training, step: Step | None = None
    ) -> dict[str, History]:
        """Train a network in place; a trained network, or one without trainable weights, is only moved to the device.

        Returns:
            The history of the training under the key `network`; empty if nothing was trained.
        """
        self.check_start(pretrained=training.pretrained)
        if training.pretrained or not can_learn(network):
            network.to(device_of(training.accelerator, training.devices)).eval()
            return {}
        with training.stage("train"):
            return {"network": train_by_loop(network, dataset, training, step=step, method=self.name)}

    def encoder_of(
        self, network: Any, head: str, dataset: Any, training: Training, *, kind: Any = None, **own: Any
    ) -> Encoder:
        """An encoder of the method's class, or of the class `kind`; an encoder that samples gets the seed."""
        kind = kind or self.encoder
        seed = {"seed": training.seed} if issubclass(kind, SeededEncoder) else {}
        return kind(network, head, **own, **seed, **inputs_of(dataset, training))


def can_learn(network: nn.Module) -> bool:
    """Whether a parameter of a network requires a gradient."""
    return any(parameter.requires_grad for parameter in network.parameters())


def curvature_of_loss(loss: Loss, learned: Learned | None = None) -> dict[str, Any]:
    """Name, settings and learned parameters of a loss's curvature, without settings that are None.

    Empty if the loss lacks a setting that the curvature needs, such as a margin.

    Example:
        >>> from lam.losses import SupCon
        >>> curvature_of_loss(SupCon(0.7, 0.2))
        {'name': 'supcon', 'split': 'logits', 'fix': 'fixed', 'average': True, 'temperature': 0.2}
    """
    known = {**settings_of(loss), **as_settings(learned or {})}
    cls: Any = CURVATURES[loss.curvature]
    given = {field.name: known[field.name] for field in fields(cls) if known.get(field.name) is not None}
    if any(field.default is MISSING and field.name not in given for field in fields(cls)):
        return {}
    return {name: value for name, value in to_settings(cls(**given)).items() if value is not None}


def head_of(network: nn.Module, dataset: Any, head: str | None = None) -> str:
    """Path of a network's head, found on the first items of a data set; see `lam.models.head.find_head`."""
    path = find_head(network, probe_of(dataset), head)
    layer: Any = network.get_submodule(path)
    check_sphere(layer.out_features)
    return path


def probe_of(dataset: Any) -> Tensor:
    """Unaugmented inputs of the first two items of a data set."""
    check_items(dataset)
    plain = without_augmentation(dataset)
    return torch.stack([_input_of(plain[index]) for index in range(min(2, len(plain)))])


def _input_of(item: Any) -> Tensor:
    value = input_and_label(item)[0]
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"inputs of a data set must be tensors, got {type(value).__name__}: convert them in the data set, images "
            "for example by torchvision.transforms.ToTensor(); only lam.fit takes dictionaries of named inputs"
        ) from error


def inputs_of(dataset: Any, training: Training) -> dict[str, Any]:
    """Arguments that every encoder takes: relation, preprocessing, and hashes of training items."""
    plain = without_augmentation(dataset)
    return {
        "relation": training.relation,
        "preprocessing": getattr(dataset, "preprocessing", None),
        "trained_on": item_hashes([_input_of(plain[index]) for index in spread(len(plain))]),
    }


def reference_inputs(dataset: Any, size: int, *, seed: int) -> Iterator[Any]:
    """Batches of unaugmented inputs from at most `size` random items of a data set.

    The seed also drives the data set's own random numbers; torch's global generator does not change.
    """
    positions = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:size].tolist()
    batches = Batches(Subset(without_augmentation(dataset), positions), batch_size=_REFERENCE_BATCH, seed=seed, epoch=0)
    return (batches[number][0] for number in range(len(batches)))

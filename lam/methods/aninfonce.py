"""AnInfoNCE: a network trained with a concentration of each embedding dimension, and nothing more.

Source: Rusak et al. (2024), "InfoNCE: identifying the gap between theory and practice".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lam.datasets.augmented import AugmentationOptions, Augmented
from lam.datasets.views import ViewsOfKinds, check_images
from lam.losses import AnInfoNCE, Loss, margin_of
from lam.methods.base import head_of
from lam.methods.deterministic import Deterministic
from lam.models.head import recorded_head_inputs
from lam.pairs.pairs import Pairs
from lam.training import History, Training
from lam.training.steps import Minibatch, Step
from lam.utils.checks import check_at_least, check_positive

_SMALLEST = 0.3  # of the crops of the last member


@dataclass(frozen=True)
class Aninfonce(Deterministic):
    """Train a network by AnInfoNCE in place of `training.loss`; what Λ became is in the history, `learned`.

    An ensemble has M Λ's, each for a way to make pairs: here crops, of which those of a later member show less of an
    image. A batch holds a view of each kind of every image, pairs are among those of one kind, and the losses of all
    members are added up. It has no curvature of its own, nor have Λ⁺ of which one has come to lie below Λ⁻, nor rows
    of any length.

    Source: equation 3, corollaries B.1 (hard negatives) and B.2 (ensembles).

    Attributes:
        concentration: Λ > 0 of all dimensions at the beginning; 5 is InfoNCE at temperature 0.1.
        n_members: M, at least 1; more than one need images.
        crop_scales: of each member, the least share of an image's area that a view shows; by default evenly from 1 to
            0.3.
        negatives: Λ⁻ of all dimensions, below `concentration`: how concentrated negatives are about their anchor, where
            a miner (`training.miner`) draws near ones. What is learned is Λ⁺, and Λ⁺ − Λ⁻ compares rows. 0 for
            negatives drawn from all items alike.
        normalise: whether the loss compares unit rows; else what the head gives, of any length. Retrieval goes by
            directions either way.

    Raises:
        ValueError: for an option outside its range.
    """

    concentration: float = 5.0
    n_members: int = 1
    crop_scales: tuple[float, ...] | None = None
    negatives: float = 0.0
    normalise: bool = True

    name = "aninfonce"

    def __post_init__(self) -> None:
        check_positive("concentration", self.concentration)
        check_at_least("n_members", self.n_members, 1)
        check_at_least("negatives", self.negatives, 0.0)
        if self.negatives >= self.concentration:
            raise ValueError(f"negatives must be below concentration, {self.concentration:g}, got {self.negatives:g}")
        if self.crop_scales is not None and len(self.crop_scales) != self.n_members:
            raise ValueError(
                f"crop_scales must be one of each of {self.n_members} members (n_members), got {len(self.crop_scales)}"
            )
        self.kinds()

    def kinds(self, base: AugmentationOptions | None = None) -> list[AugmentationOptions]:
        """Crops and flips of each member, flips being those of `base`."""
        scales = self.crop_scales or torch.linspace(1, _SMALLEST, self.n_members).tolist()
        return [replace(base or AugmentationOptions(), crop_scale=None if scale == 1 else scale) for scale in scales]

    def own_loss(self, loss: Loss, dimension: int) -> AnInfoNCE:
        """AnInfoNCE, with the margin of the training's loss, which miners go by."""
        negatives = torch.full((dimension,), float(self.negatives))
        options: dict[str, Any] = {"n_members": self.n_members, "negatives": negatives, "margin": margin_of(loss)}
        return AnInfoNCE(dimension, self.concentration, **options)

    def trained_by(
        self, loss: Loss, dimension: int, learned: Mapping[str, Sequence[float]] | None = None
    ) -> dict[str, Any]:
        """Nothing for several Λ, rows of any length, or a Λ that is negative in all; see `Method.trained_by`."""
        if self.n_members > 1 or not self.normalise or min((learned or {}).get("concentration", [1.0])) <= 0:
            return {}
        return super().trained_by(loss, dimension, learned)

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Refuse members of what is no image, too; see `Method.check`."""
        super().check(network, dataset, training)
        if self.n_members > 1:
            check_images(dataset, "take a single member, n_members=1")

    def trained_network(
        self, network: nn.Module, dataset: Any, training: Training, step: Step | None = None
    ) -> dict[str, History]:
        """Train a network in place; see `Method.trained_network`."""
        if self.n_members > 1 or not self.normalise:
            step = AnInfoNCEStep(self.settings(), head_of(network, dataset))
        if self.n_members > 1:
            base = dataset.options if isinstance(dataset, Augmented) else None
            dataset = ViewsOfKinds(dataset, self.kinds(base))
        return super().trained_network(network, dataset, training, step)


class AnInfoNCEStep(Step):
    """Take the gradient of the sum over members, each of the views that are its own, by unit rows or the head's own.

    Args:
        options: of the method.
        head: path of the layer that gives the rows.
    """

    def __init__(self, options: dict[str, Any], head: str) -> None:
        self.options, self.head = options, head

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the method; a run is resumed only with the same."""
        return self.options

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the gradient of one batch."""
        of_members = loss
        if not isinstance(of_members, AnInfoNCE):
            raise TypeError(f"the loss must be AnInfoNCE, got {type(loss).__name__}")
        with recorded_head_inputs(network, self.head) as head_inputs:
            compared = embeddings = network(batch.inputs)
        if not self.options["normalise"]:
            compared = network.get_submodule(self.head)(batch.gathered(head_inputs[-1]))
        terms = []
        for number, rows in enumerate(rows_of_members(batch, self.options["n_members"])):
            own, targets = embeddings[rows], None if batch.targets is None else batch.targets[rows]
            pairs = replace(batch, pairs=pairs_among(batch.pairs, rows), targets=targets).mined(own, margin_of(loss))
            terms.append(of_members.of_member(compared[rows], pairs, number))
        value = torch.stack(terms).sum()
        backward(value)
        return value.detach()


def rows_of_members(batch: Minibatch, n_members: int) -> list[Tensor]:
    """Which items of a batch are views of each kind: in every process's part the first, then the second."""
    rows = torch.arange(batch.pairs.size, device=batch.pairs.positive.device).split(batch.sizes or batch.pairs.size)
    parts = [part.chunk(n_members) for part in rows if len(part)]
    return [torch.cat(of_member) for of_member in zip(*parts, strict=True)]


def pairs_among(pairs: Pairs, rows: Tensor) -> Pairs:
    """The pairs of which both items are among these."""
    positive, negative = pairs.positive[rows][:, rows], pairs.negative[rows][:, rows]
    labels = None if pairs.labels is None else pairs.labels[rows]
    return Pairs(positive, negative, int(positive.sum()), int(negative.sum()), labels)

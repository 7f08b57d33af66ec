"""Tests which augmentations can be read from embeddings that were trained on augmented views.

Source: Rusak et al. (2024), "InfoNCE: identifying the gap between theory and practice", table 1 and appendix G.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lam import losses
from lam.datasets.augmented import TwoViews, Views
from lam.datasets.base import Dataset
from lam.encoders.base import Encoder
from lam.experiments.base import SECONDS, Outcome, Progress, check_choices
from lam.experiments.images import ImageExperiment, pixels_of
from lam.inputs.corruption import corrupt
from lam.methods import Aninfonce, Method, Simclr
from lam.methods.base import head_of
from lam.methods.deterministic import AnInfoNCEStep
from lam.retrieval.metrics.probing import linear_probe
from lam.training import History, Training
from lam.training.steps import Step
from lam.utils.checks import check_at_least, check_positive

LossOfViews = Literal["infonce", "aninfonce", "unnormalised"]
_KINDS = "brightness", "low-contrast", "crop", "blur"
_SEVERITY = 3
_BLOCK = 500  # images embedded at once


@dataclass(frozen=True, kw_only=True)
class AugmentationReadout(ImageExperiment):
    """Each loss trains a network on two views of each image; then linear classifiers read classes and augmentations.

    A view is a crop with another brightness and contrast. For each kind of augmentation, about half of the images are
    augmented at severity 3, and a classifier tells which; chance is 0.5. Two kinds, `blur` and `saturate` (only for
    colour images), are not part of the views. Features are the inputs of the network's last layer; the projection is
    the output of that layer. `unnormalised` is `aninfonce` without normalisation of the outputs.

    The authors use ResNets, CIFAR-10 and ImageNet, 100 to 1,000 epochs, and views that also change hue and saturation.

    Attributes:
        losses: losses to compare.
        temperature: temperature of InfoNCE; AnInfoNCE starts at the equivalent Λ.
        batch_size: images in a batch, each with two views.
        crop_scale, jitter: strengths of the views, as in `lam.methods.Simclr`.
        n_corrupted: number of training images, and of test images, for the linear classifiers, at least 20.
    """

    losses: tuple[LossOfViews, ...] = get_args(LossOfViews)
    temperature: float = 0.5
    batch_size: int = 128
    crop_scale: float = 0.3
    jitter: float = 0.4
    n_corrupted: int = 1000

    name = "augmentation-readout"
    title = "Which augmentations does an embedding keep?"
    conditions = "loss", "features"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("temperature", self.temperature)
        check_at_least("batch_size", self.batch_size, 2)
        check_at_least("n_corrupted", self.n_corrupted, 20)  # of fewer, all or none may be augmented
        check_choices("losses", self.losses, get_args(LossOfViews))
        self._method("infonce")

    def run(self, progress: Progress) -> Outcome:
        """Run the experiment: a table row for the features and the projection of each loss."""
        train, test = self.parts()
        rows: list[dict[str, Any]] = []
        for name in self.losses:
            method, unused = self._method(name), losses.build(margin=0.7)
            encoder, seconds = self.trained(method, unused, train, self.batch_size, name, progress)
            kinds = (*_KINDS, *(("saturate",) if train.shape[0] == 3 else ()))
            seen = {"classes": [self._clean(encoder, part) for part in (train, test)]}
            seen |= {kind: [self._augmented(encoder, part, kind) for part in (train, test)] for kind in kinds}
            for features in ("features", "projection"):
                row: dict[str, Any] = {"loss": name, "features": features}
                for what, ((known, labels), (unseen, truth)) in seen.items():
                    row[what] = linear_probe(known[features], labels, unseen[features], truth)
                row["mean of augmentations"] = sum(row[kind] for kind in kinds) / len(kinds)
                rows.append({**row, SECONDS: seconds})
        return Outcome(rows, notes=["By chance, the accuracy is 0.5 for each augmentation."])

    def _method(self, name: LossOfViews) -> Method:
        views: dict[str, Any] = {"crop_scale": self.crop_scale, "jitter": self.jitter}
        if name == "infonce":
            return Simclr(kappa="none", temperature=self.temperature, **views)
        start = 1 / (2 * self.temperature)
        return AninfonceOfViews(concentration=start, normalise=name == "aninfonce", **views)

    def _clean(self, encoder: Encoder, images: Dataset) -> tuple[dict[str, Tensor], Tensor]:
        """Features and classes of images."""
        pixels = pixels_of(images, self.n_corrupted)
        return self._features(encoder, pixels, images), images.labels[: self.n_corrupted]

    def _augmented(self, encoder: Encoder, images: Dataset, kind: str) -> tuple[dict[str, Tensor], Tensor]:
        """Features of images after about half are augmented, and 1 for each augmented image, else 0."""
        generator, pixels = torch.Generator().manual_seed(self.seed), pixels_of(images, self.n_corrupted)
        changed = torch.rand(len(pixels), generator=generator) < 0.5
        pixels[changed] = corrupt(pixels[changed], kind, _SEVERITY, generator=generator)
        return self._features(encoder, pixels, images), changed.long()

    def _features(self, encoder: Encoder, pixels: Tensor, images: Dataset) -> dict[str, Tensor]:
        network: Any = encoder.network
        head = network.get_submodule(head_of(network, images))
        inputs = images.preprocessing.standardize(pixels)
        features = torch.cat([encoder.predict(block).features for block in inputs.split(_BLOCK)])
        with torch.no_grad():
            projection = head(features.to(next(head.parameters())))
        return {"features": features.cpu(), "projection": projection.cpu()}


@dataclass(frozen=True)
class AninfonceOfViews(Aninfonce):
    """AnInfoNCE of two views of each image, without labels; see `Views` for the options."""

    crop_scale: float = 0.3
    jitter: float = 0.4

    def train_network(
        self, network: nn.Module, dataset: Any, training: Training, step: Step | None = None
    ) -> dict[str, History]:
        """Train a network in place; see `Method.train_network`."""
        views = TwoViews(dataset, Views(crop_scale=self.crop_scale, jitter=self.jitter))
        if not self.normalise:  # `Aninfonce` would look for a head in the views
            step = AnInfoNCEStep(self.settings(), head_of(network, dataset))
        return super().train_network(network, views, training, step)

"""`ImageExperiment`, the base of experiments on images: data, networks, training, corruptions and embeddings."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader

from lam import datasets, models
from lam.datasets.base import Dataset
from lam.encoders.base import Encoder, Prediction
from lam.experiments.base import Experiment, Progress
from lam.inputs.corruption import PUBLISHED_STRENGTHS, corrupt, published_kinds
from lam.losses import Loss
from lam.methods.base import Method
from lam.training import Training
from lam.utils.checks import check_at_least, check_positive

DataName = Literal["digits", "fashionmnist", "cifar10", "folder"]
NetworkName = Literal["convnet8", "convnet28", "convnet32", "cifar_resnet18", "cifar_resnet50"]
NETWORKS: dict[DataName, NetworkName] = {
    **{"digits": "convnet8", "fashionmnist": "convnet28"},
    **{"cifar10": "convnet32", "folder": "convnet32"},
}
_OPTIONS: dict[DataName, dict[str, Any]] = {"folder": {"preprocessing": {"size": 32, "crop": 32}}}
_BATCH = 500  # images embedded at once


@dataclass(frozen=True, kw_only=True)
class ImageExperiment(Experiment):
    """An experiment that trains networks on images and evaluates their features.

    All seeds share one training and one test split; the validation split is unused. The last epoch is evaluated.

    Attributes:
        data: "digits", "fashionmnist", "cifar10", or "folder" for images in class folders, resized and cropped to 32
            pixels.
        root: folder of the data, if they need one.
        limit: greatest number of images in each split, at least 40; None for all.
        network: name of the network; by default a small network for the size of the images.
        dimension: D of the embeddings.
        epochs: passes over the data, at least 1.
        learning_rate: learning rate of Adam.
        n_corrupted: number of test images to corrupt by each kind of `lam.inputs.corruption.published_kinds`.
    """

    data: DataName = "digits"
    root: str | None = None
    limit: int | None = None
    network: NetworkName | None = None
    dimension: int = 16
    epochs: int = 20
    learning_rate: float = 1e-3
    n_corrupted: int = 200

    def __post_init__(self) -> None:
        for name, least in (("dimension", 2), ("epochs", 1), ("n_corrupted", 1), ("limit", 40)):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), least)
        check_positive("learning_rate", self.learning_rate)

    def parts(self) -> tuple[Dataset, Dataset]:
        """The training and test images, in random order, because some results are for the first images alone."""
        splits = datasets.load(self.data, root=self.root, **_OPTIONS.get(self.data, {}))
        limit = max(len(splits.train), len(splits.test)) if self.limit is None else self.limit
        train, test = (part.limit(limit) for part in (splits.train, splits.test))
        return (_shuffle(train), _shuffle(test)) if self.data == "folder" else (train, test)

    def trained(
        self, method: Method, loss: Loss, images: Dataset, batch_size: int, name: str, progress: Progress
    ) -> tuple[Encoder, float]:
        """The encoder that a method trains on these images, and the processor seconds; progress counts epochs."""
        start, epochs = time.process_time(), count(1)

        def after_an_epoch(_: torch.nn.Module) -> float:
            epoch = next(epochs)
            progress(name, epoch, self.epochs)
            return float(epoch)  # the last epoch scores best

        name_of_network = self.network or NETWORKS[self.data]
        network = models.build(name_of_network, dimension=self.dimension, seed=self.seed, channels=images.shape[0])
        training = Training(
            loss=loss,
            epochs=self.epochs,
            batch_size=batch_size,
            learning_rate=self.learning_rate,
            seed=self.seed,
            accelerator=self.accelerator,
            validate=after_an_epoch,
            progress=False,
        )
        encoder = method.train(network, images, training).encoder
        return encoder, time.process_time() - start

    def corruptions(self, images: Dataset) -> Iterator[tuple[str, list[Float[Tensor, "N C H W"]]]]:
        """For each kind, inputs from the first `n_corrupted` images at severities 0 (clean) to 5."""
        generator, pixels = torch.Generator().manual_seed(self.seed), pixels_of(images, self.n_corrupted)
        for kind in published_kinds(images.shape[0]):
            severities = range(len(PUBLISHED_STRENGTHS[kind]) + 1)
            worse = [corrupt(pixels, kind, severity, generator=generator) for severity in severities]
            yield kind, [images.preprocessing.standardize(corrupted) for corrupted in worse]


def _shuffle(images: Dataset) -> Dataset:
    """The images of a folder in a fixed random order, instead of one class after another."""
    return images.subset(torch.randperm(len(images), generator=torch.Generator().manual_seed(0)))


def pixels_of(images: Dataset, most: int | None = None) -> Float[Tensor, "N C H W"]:
    """Pixels in [0, 1] of the first `most` images, by default of all."""
    rows = range(len(images))[:most]
    return images.preprocessing.denormalize(torch.stack([images[row][0] for row in rows]))


def predicted(encoder: Encoder, images: Dataset) -> Prediction:
    """Features and embeddings of images, on the CPU."""
    prediction = encoder.predict(DataLoader(images, _BATCH, generator=torch.Generator()))
    return Prediction(prediction.features.cpu(), prediction.embeddings.to("cpu"))


def accuracy(answers: Tensor, labels: Tensor) -> float:
    """Share of right answers."""
    return float((answers == labels).double().mean())


def over_severity(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points (severity, value) of a curve over severities 0, 1, ..."""
    return [(float(severity), value) for severity, value in enumerate(values)]

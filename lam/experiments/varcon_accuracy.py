"""Accuracy of simple classifiers on features trained by VarCon, SupCon and other losses.

Source: Wang et al. (2025), "Variational supervised contrastive learning", tables 1 to 3 and 6, figures 2 to 5.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lam import losses
from lam.datasets.base import Dataset
from lam.experiments.base import SECONDS, Outcome, Plot, Progress, check_choices
from lam.experiments.images import ImageExperiment, accuracy, over_severity, predicted
from lam.losses import Loss, VarCon
from lam.losses.base import TrainableLoss
from lam.methods import Deterministic, Method, Simclr
from lam.pairs.pairs import Pairs
from lam.retrieval.metrics.probing import LinearProbe, clustering, knn_accuracy
from lam.utils.checks import check_at_least

LossOfClasses = Literal["varcon", "supcon", "cross_entropy", "simclr"]
_NEIGHBOURS = 5, 20
_PERPLEXITY = 50  # as in Wang et al. (2025)
_MAPPED = 2000  # items in a picture


@dataclass(frozen=True, kw_only=True)
class VarConAccuracy(ImageExperiment):
    """Train networks with each loss at several batch sizes, and on few images of each class. Then freeze them.

    A linear classifier is trained on the features. k-NN is evaluated on the embeddings, and Ward's clusters of the
    embeddings are compared with classes (NMI, ARI, purity). "under corruption" is the linear classifier's mean accuracy
    over kinds of corruption and severities 1 to 5. `cross_entropy` learns a direction for each class, at `temperature`.
    `simclr` learns without labels from two random views of each image, at a temperature of 0.5. A t-SNE plot shows the
    test embeddings of each loss after training on all images at the first batch size.

    Wang et al. (2025) train ResNets by SGD for 200 to 350 epochs, in batches up to 6,144, on two heavily augmented
    views for all losses. Here networks are small, Adam trains them, and only `simclr` augments images.

    Attributes:
        losses: losses to compare.
        batch_sizes: batch sizes of trainings on all images.
        few: numbers of images of each class, for trainings at the first batch size.
        temperature: temperature of all losses except `simclr`.
        epsilon: fixed `epsilon` of `lam.losses.VarCon`, within ±temperature; None to learn it.
    """

    losses: tuple[LossOfClasses, ...] = get_args(LossOfClasses)
    batch_sizes: tuple[int, ...] = (64, 16, 256)
    few: tuple[int, ...] = (5, 20)
    temperature: float = 0.1
    epsilon: float | None = None

    name = "varcon-accuracy"
    title = "Is VarCon ahead of SupCon?"
    conditions = ("loss", "batch", "images a class")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices("losses", self.losses, get_args(LossOfClasses))
        self._varcon()
        if not self.batch_sizes:
            raise ValueError("batch_sizes must be at least one size, got none")
        for name, values in (("batch_sizes", self.batch_sizes), ("few", self.few)):
            for value in values:
                check_at_least(name, value, 2)

    def run(self, progress: Progress) -> Outcome:
        """Run the experiment: a table row for each training, and accuracy over severity."""
        train, test = self.parts()
        ways = [(batch_size, None) for batch_size in self.batch_sizes]
        ways += [(self.batch_sizes[0], number) for number in self.few]
        rows, curves, maps = [], {}, {}
        for name in self.losses:
            for batch_size, number in ways:
                method, loss = self._method(name, len(train.classes))
                images = train if number is None else self._few(train, number)
                encoder, seconds = self.trained(method, loss, images, batch_size, name, progress)
                row: dict[str, Any] = {"loss": name, "batch": float(batch_size)}
                row["images a class"] = None if number is None else float(number)
                known, unseen = predicted(encoder, images), predicted(encoder, test)
                probe = LinearProbe(known.features, images.labels)
                row["linear probe"] = accuracy(probe.predict(unseen.features), test.labels)
                means = known.embeddings.mean, images.labels, unseen.embeddings.mean, test.labels
                for k in _NEIGHBOURS:
                    row[f"k-NN, {k}"] = knn_accuracy(*means, k=min(k, len(images)))
                clusters = clustering(unseen.embeddings.mean, test.labels)
                for column, figure in (("NMI", "nmi"), ("ARI", "ari"), ("purity", "purity")):
                    row[column] = None if clusters is None else getattr(clusters, figure)
                truth, by_kind = test.labels[: self.n_corrupted], list[list[float]]()
                for _, severities in self.corruptions(test):
                    answers = [probe.predict(encoder.predict(inputs).features) for inputs in severities]
                    by_kind.append([accuracy(of_severity, truth) for of_severity in answers])
                under = torch.tensor(by_kind)
                row["under corruption"] = float(under[:, 1:].mean())
                rows.append({**row, SECONDS: seconds})
                if (batch_size, number) == ways[0]:
                    curves[name] = over_severity(under.mean(0).tolist())
                    maps[f"Test embeddings by t-SNE, {name}"] = self._map(unseen.embeddings.mean, test)
        plot = Plot("severity", "accuracy", curves)
        return Outcome(rows, {"Accuracy of the linear probe over severity, the mean over kinds": plot, **maps})

    def _method(self, name: LossOfClasses, n_classes: int) -> tuple[Method, Loss]:
        loss = losses.build("supcon", margin=0.7, temperature=self.temperature)
        if name == "simclr":
            return Simclr(kappa="none"), loss
        if name == "cross_entropy":
            loss = ClassDirections(n_classes, self.dimension, self.temperature, self.seed)
        if name == "varcon":
            loss = self._varcon()
        return Deterministic(), loss

    def _varcon(self) -> VarCon:
        return VarCon(self.temperature, self.epsilon, learn=self.epsilon is None, margin=0.7)

    def _map(self, mean: Tensor, images: Dataset) -> Plot:
        from sklearn.manifold import TSNE

        perplexity = min(_PERPLEXITY, len(mean) / 4)
        found = TSNE(perplexity=perplexity, random_state=self.seed).fit_transform(mean[:_MAPPED].cpu().numpy())
        clouds: dict[str, list[tuple[float, float]]] = {}
        for label, point in zip(images.labels.tolist(), found.tolist(), strict=False):
            clouds.setdefault(str(images.classes[label]), []).append(tuple(point))
        return Plot("", "", dict(sorted(clouds.items())))

    def _few(self, images: Dataset, number: int) -> Dataset:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.seed))
        labels = images.labels[order]
        return images.subset(torch.cat([order[labels == label][:number] for label in labels.unique()]))


class ClassDirections(TrainableLoss):
    """Cross-entropy of each item's cosines with learned class directions, divided by the temperature."""

    needs_classes = True

    def __init__(self, n_classes: int, dimension: int, temperature: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.directions = nn.Parameter(torch.randn(n_classes, dimension, generator=generator) / math.sqrt(dimension))
        self.temperature = temperature

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        cosines = embeddings @ F.normalize(self.directions).T
        if pairs.labels is None:
            raise ValueError("cross-entropy needs pairs with labels, got pairs without labels")
        return F.cross_entropy(cosines / self.temperature, pairs.labels)

"""Tests whether a κ learned without labels, from two views, detects corruption and wrong answers.

Source: "Probabilistic contrastive learning with explicit concentration on the hypersphere", tables 1 to 4 and 6 to 8,
figures 2 to 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from lam import datasets, losses
from lam.encoders.base import Prediction
from lam.experiments.base import SECONDS, Outcome, Plot, Progress, check_choices
from lam.experiments.images import ImageExperiment, over_severity, predicted
from lam.methods import Byol, Simclr, Simsiam, Swav
from lam.methods.views import ViewsMethod
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.probing import LinearProbe, knn_accuracy, linear_probe
from lam.retrieval.metrics.reference import NEIGHBOUR
from lam.retrieval.metrics.uncertainty import mann_whitney_p, rank_correlation
from lam.utils.checks import check_at_least

Base = Literal["simclr", "simsiam", "byol", "swav"]
Addition = Literal["none", "square", "likelihood"]
BY_KIND = "Rank correlation of severity and mean κ, by kind of corruption"
"""Title of a table like the paper's table 1: a row for each kind, and a column for each base and addition."""
BY_OOD_SET = "AUROC of OOD images, by features, κ and both"
"""Title of a table like the paper's table 2, for trainings with κ."""
_METHODS: dict[Base, type[ViewsMethod]] = {"simclr": Simclr, "simsiam": Simsiam, "byol": Byol, "swav": Swav}
_BLOCK = 512  # items whose distances are in memory at once
_STRONG = -0.8  # most rank correlations in the paper's table are lower


@dataclass(frozen=True, kw_only=True)
class ExplicitConcentration(ImageExperiment):
    """Each base method learns from two views of each image, with and without an explicit concentration.

    Then the network is frozen. Its features train a linear classifier, and 20 neighbours vote. For each kind of
    corruption, the table has the rank correlation of mean κ with severities 0 to 5; −1 is best. A linear classifier on
    the mean directions answers, and −κ detects its wrong answers (AUROC, and the p-value of the Mann-Whitney test).
    `outlyingness` separates OOD images from test images (AUROC).

    The authors use ResNet-50, CIFAR-10, 1,000 epochs and 18 kinds of corruption; this experiment lacks changes of
    colour, flips and frost. For OOD images, they use the features of another network, trained with labels.

    Attributes:
        bases: base methods.
        additions: "none" for the base method without κ, or a regulariser of κ.
        weight: weight λ_a of the alignment loss.
        decay: factor λ of the regulariser "square", λκ².
        jitter, noise: strengths of two changes of each view, as in `lam.methods.Simclr`.
        batch_size: images in a batch, each with two views.
        ood: folder (or None) of each OOD set, by its name in `lam.datasets.load_ood`.
    """

    bases: tuple[Base, ...] = get_args(Base)
    additions: tuple[Addition, ...] = get_args(Addition)
    weight: float = 0.05
    decay: float = 0.005
    jitter: float = 0.4
    noise: float = 0.0
    batch_size: int = 128
    ood: Mapping[str, str | None] = field(default_factory=dict)

    name = "explicit-concentration"
    title = "Does an explicit concentration say how ambiguous an image is?"
    conditions = ("base", "κ")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch_size", self.batch_size, 2)
        check_choices("bases", self.bases, get_args(Base))
        check_choices("additions", self.additions, get_args(Addition))
        self._method(self.bases[0], "square")

    def run(self, progress: Progress) -> Outcome:
        """Run the experiment: a table row for each base method with each addition, and tables of κ."""
        train, test = self.parts()
        ood_sets = {
            name: datasets.load_ood(name, like=test, root=root).limit(len(test)) for name, root in self.ood.items()
        }
        rows, curves, by_kind, of_ood = [], {}, {}, []
        for base in self.bases:
            for addition in self.additions:
                method, unused = self._method(base, addition), losses.build(margin=0.7)
                encoder, seconds = self.trained(method, unused, train, self.batch_size, base, progress)
                known, unseen = predicted(encoder, train), predicted(encoder, test)
                features = known.features, train.labels, unseen.features, test.labels
                row: dict[str, Any] = {"base": base, "κ": addition}
                row["linear probe"] = linear_probe(*features)
                row["k-NN"] = knn_accuracy(*features, k=min(20, len(train)))
                answers = LinearProbe(known.embeddings.mean, train.labels).predict(unseen.embeddings.mean)
                right, kappa = answers == test.labels, unseen.embeddings.kappa
                row["wrong"] = float((~right).sum())
                means = {
                    kind: [float(encoder.embed(inputs).kappa.double().mean()) for inputs in severities]
                    for kind, severities in (self.corruptions(test) if addition != "none" else ())
                }
                found = {kind: rank_correlation(torch.arange(6), torch.tensor(by)) for kind, by in means.items()}
                row |= self._of_kappa(found, kappa if addition != "none" else None, right)
                for name, items in ood_sets.items() if addition != "none" else ():
                    inside, outside = (outlyingness(part, known) for part in (unseen, predicted(encoder, items)))
                    areas = {by: auroc(inside[by], outside[by]) for by in inside}
                    of_ood.append({"base": base, "regulariser": addition, "OOD set": name, **areas})
                rows.append({**row, SECONDS: seconds})
                for kind, correlation in found.items():
                    by_kind.setdefault(kind, {"kind": kind})[f"{base}, {addition}"] = correlation
                curves = curves or {kind: over_severity(by) for kind, by in means.items()}
        plot = Plot("severity", "mean κ", curves)
        plots = {"Mean κ over severity, of the first row that has one": plot} if curves else {}
        tables = {BY_KIND: [*by_kind.values()], BY_OOD_SET: of_ood}
        return Outcome(rows, plots, tables={title: table for title, table in tables.items() if table})

    def _method(self, base: Base, addition: Addition) -> ViewsMethod:
        options: dict[str, Any] = {"kappa": "none"} if addition == "none" else {"regulariser": addition}
        views = {"jitter": self.jitter, "noise": self.noise}
        return _METHODS[base](weight=self.weight, decay=self.decay, **views, **options)

    def _of_kappa(
        self, by_kind: Mapping[str, float | None], kappa: torch.Tensor | None, right: torch.Tensor
    ) -> dict[str, float | None]:
        """The columns on κ; all are None for a method without κ, some for a constant κ."""
        columns = "correlation with severity", "kinds at most −0.8", "AUROC of wrong", "p of Mann-Whitney"
        if kappa is None:
            return dict.fromkeys(columns)
        known = [correlation for correlation in by_kind.values() if correlation is not None]
        mean = sum(known) / len(known) if len(known) == len(by_kind) else None
        strong = float(sum(correlation <= _STRONG for correlation in known))
        some = bool(right.any() and not right.all())
        area = auroc(-kappa[right], -kappa[~right]) if some else None
        return dict(zip(columns, (mean, strong, area, mann_whitney_p(right, -kappa) if some else None), strict=True))


def outlyingness(items: Prediction, known: Prediction) -> dict[str, torch.Tensor]:
    """Three scores (N,) of items, higher for OOD items, as in the paper's table 2.

    `features` is the distance to the fifth nearest known item, `κ` is −κ, and `both` is the distance with κ as another
    feature. For distances, features and κ are divided by their standard deviations over the known items, if they vary.
    """
    parts = [prediction.features for prediction in (items, known)]
    kappas = [prediction.embeddings.kappa[:, None].to(parts[0]) for prediction in (items, known)]
    # in float32, the deviation of a constant may be a rounding error
    of_features, of_kappa = (float(pair[1].double().std()) or 1.0 for pair in (parts, kappas))
    rows, reference = (
        torch.cat([part / of_features, kappa / of_kappa], 1) for part, kappa in zip(parts, kappas, strict=True)
    )

    def distance(width: int) -> torch.Tensor:
        k = min(NEIGHBOUR, len(reference))
        blocks = (torch.cdist(block[:, :width], reference[:, :width]) for block in rows.split(_BLOCK))
        return torch.cat([block.kthvalue(k, dim=1).values for block in blocks])

    width = reference.shape[1]
    return {"features": distance(width - 1), "κ": -kappas[0][:, 0], "both": distance(width)}

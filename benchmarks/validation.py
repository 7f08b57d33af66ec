"""Evaluation on validation data alone: retrieval, calibration, and OOD sets of altered validation images and digits.

The test split and MNIST are not read. OOD sets are the validation images, inverted and with permuted pixels, and
scikit-learn's digits.
"""

import statistics
from typing import Any, cast

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader

from lam.datasets import Splits
from lam.evaluation import Evaluation, evaluate
from lam.retrieval.metrics.reference import Reference

FIGURES = ("map@1", "ausc", "ece", "auroc@inverted", "auroc@permuted", "auroc@digits")


def ood_of(images: Tensor) -> dict[str, Tensor]:
    """OOD sets without clothes: as bright as the images, as dark, or drawn by hand."""
    order = torch.randperm(images[0].numel(), generator=torch.Generator().manual_seed(0))
    digits = torch.as_tensor(cast(Any, load_digits()).images).float()[:, None] / 16
    return {
        "inverted": 1 - images,
        "permuted": images.flatten(1)[:, order].view_as(images),
        "digits": F.pad(F.interpolate(digits, (20, 20), mode="bilinear"), (4, 4, 4, 4)),
    }


def on_validation(encoder: Any, splits: Splits, reference: Reference | None = None) -> Evaluation:
    """Evaluate on the validation split and the OOD sets made of it."""
    validation = list(DataLoader(splits.validation, batch_size=500))
    sets = ood_of(torch.cat([images for images, _ in validation]))
    ood = {name: list(images.split(500)) for name, images in sets.items()}
    return evaluate(encoder, validation, ood, reference=reference, n_samples=100)


def figures_of(found: Evaluation) -> dict[str, float]:
    """The figures that decide a choice."""
    metrics: dict[str, Any] = found.metrics | {"auroc@inverted": found.metrics["auroc"]}
    return {figure: metrics[figure] for figure in FIGURES}


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure over seeds."""
    return {figure: statistics.fmean(row[figure] for row in rows) for figure in rows[0]}

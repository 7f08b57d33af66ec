"""Whether the intervals at hits hold the cosine of another item of the query's class, compared with equal widths."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from real_scores import Cell
from torch import Tensor

from lam.retrieval.decisions.verification import LEVEL, CosineIntervals, pairs_of
from lam.vmf.embeddings import Embeddings

POWERS = {"one width": 0.0, "κ^(-1/4)": 0.25, "κ^(-1/2)": 0.5}
"""Powers of κ in the width; the second is the default."""


def measure_intervals(cell: Cell) -> dict[str, dict[str, float]] | None:
    """The interval score on one half of the calibration queries, and figures of the test queries, for each width."""
    posterior = cell.posterior()
    gallery = F.normalize(posterior.predict(cell.of("gallery")[0]).mean.double())
    (asked, labels), (tested, test_labels) = (
        (posterior.predict(cell.of(name)[0]), cell.of(name)[1]) for name in ("calibration", "test")
    )
    half = torch.zeros(len(labels), dtype=torch.bool)
    for rows in pairs_of(labels):
        half[rows[::2]] = True
    measured, typical = {}, asked.kappa.double().median()
    for name, power in POWERS.items():
        (one, other, both, test) = (
            replace(part, kappa=(part.kappa.double() / typical) ** (4 * power), variance=part.kappa)
            for part in (asked[half], asked[~half], asked, tested)
        )
        of_half, fitted = _fitted(one, labels[half], gallery), _fitted(both, labels, gallery)
        if fitted is None:
            return None
        measured[name] = _figures(fitted, test, test_labels, gallery)
        if of_half is not None:
            measured[name]["validation_score"] = _figures(of_half, other, labels[~half], gallery)["score"]
    return measured


def _fitted(queries: Embeddings, labels: Tensor, gallery: Tensor) -> CosineIntervals | None:
    hits = (F.normalize(queries.mean.double()) @ gallery.T).topk(10).indices
    return CosineIntervals.fit(queries, labels, gallery, hits)


def _figures(intervals: CosineIntervals, queries: Embeddings, labels: Tensor, gallery: Tensor) -> dict[str, float]:
    """Coverage, also for the smallest κ (in `variance`), width, and interval score (Gneiting, Raftery 2007)."""
    first, second = pairs_of(labels)
    asking, other = torch.cat([first, second]), torch.cat([second, first])
    mean = F.normalize(queries.mean.double())
    cosines, hits = (mean[asking] @ gallery.T).topk(10)
    another = (gallery[hits] * mean[other][:, None]).sum(2)
    low, high = intervals(cosines, queries.kappa[asking]).unbind(2)
    held = ((low <= another) & (another <= high)).double()
    missed = (low - another).clamp(min=0) + (another - high).clamp(min=0)
    least = queries.variance[asking].argsort()[: len(asking) // 3]
    return {
        "coverage": float(held.mean()),
        "coverage_least_kappa": float(held[least].mean()),
        "width": float((high - low).mean()),
        "score": float((high - low + 2 / (1 - LEVEL) * missed).mean()),
    }

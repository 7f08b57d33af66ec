"""Calibration on queries in the gallery, beside calibration on queries outside it, over the cells of `real.py`.

Many users index all of their data before they calibrate. Such a query is searched without itself.
"""

from typing import Any

import torch
from real_scores import Cell, Part, draw
from torch import Tensor

from lam.retrieval import Choices, Targets, calibrate_vectors, judge
from lam.retrieval.metrics.ood import auroc

RATE = 0.05
DEPTH = 50


def measure_indexed(cell: Cell) -> dict[str, Any]:
    """For a gallery with and without the calibration queries: error rates, AUROC of right hits, and ECE of P(right).

    False accepts are of test queries without the items of their class. AUROC and ECE are over test queries and as much
    weight of strangers; `auroc_cosine` is for the first cosine.
    """
    parts, measured = draw(cell), {}
    asked, test, strange = parts.calibration, parts.test, parts.strange
    for name, items in {"indexed": (parts.gallery, asked), "apart": (parts.gallery,)}.items():
        vectors, labels = (
            torch.cat([part.embeddings.mean for part in items]),
            torch.cat([part.labels for part in items]),
        )
        choices = Choices(Targets(far=max(RATE, least := 1.01 / (len(asked.labels) + 1)), ood=max(RATE, least)))
        made = calibrate_vectors(asked.embeddings, words(asked.labels), vectors, words(labels), choices)

        def decide(part: Part, *, matched: bool = True, made: Any = made, of: Any = (vectors, labels)) -> Any:
            vectors, labels = of
            cosines = part.embeddings.mean @ vectors.T
            if not matched:
                cosines = cosines.masked_fill(part.labels[:, None] == labels, -1.0)
            best, hits = cosines.clamp(-1, 1).topk(min(DEPTH, len(labels)), dim=1)
            found = [words(row) for row in labels[hits]]
            decisions = judge(made, part.embeddings, best, found, gallery_size=len(labels))
            return decisions, best[:, 0], labels[hits[:, 0]] == part.labels

        (known, cosine, right), (outside, cosine_outside, _) = decide(test), decide(strange)
        unmatched = decide(test, matched=False)[0]
        probability, of_strange = known.probability.double(), outside.probability.double()
        gaps = torch.zeros(10, dtype=torch.float64)
        for one, correct in ((probability, right), (of_strange, torch.zeros(len(of_strange)))):
            gaps.index_add_(0, (10 * one).long().clamp(max=9), (one - correct.double()) / (2 * len(one)))
        measured[name] = {
            "promised": made.targets.far,
            "false_accepts": share(unmatched, "match"),
            "false_flags": share(known, "abstain"),
            "auroc_right": auroc(-probability[right], -torch.cat([probability[~right], of_strange])),
            "auroc_cosine": auroc(-cosine[right], -torch.cat([cosine[~right], cosine_outside])),
            "ece": float(gaps.abs().sum()),
        }
    return measured


def words(labels: Tensor) -> list[str]:
    """Labels as text."""
    return [str(label) for label in labels.tolist()]


def share(decisions: Any, kind: str) -> float:
    """Share of decisions of one kind."""
    return sum(decision == kind for decision in decisions.decision) / len(decisions.decision)

"""Decisions from hits, for the command line, the service and Python."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from lam.retrieval.decisions.abstention import SearchDecisions
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.index.hits import Hits, label_numbers
from lam.vmf.embeddings import Embeddings

PValues = tuple[float, float] | None
"""p-values of "the class is new" and of "the class is in the gallery", see `Calibration.unseen_p_values`."""


def decide(
    calibration: Calibration,
    queries: Embeddings,
    features: Float[Tensor, "Q P"] | None,
    hits: Hits,
    labels: Sequence[Sequence[str]],
    *,
    gallery_size: int,
) -> tuple[SearchDecisions, list[PValues]]:
    """Decisions on Q queries from their hits, and p-values of unseen classes.

    Args:
        features: features of the queries; None if clients sent embeddings.
        hits: at least `N_HITS` for each query, or all items of the gallery.
        labels: Q lists of the hits' labels; the label of an unlabelled hit is empty.

    Raises:
        ValueError: as `Calibration.decide`.
    """
    numbers, first = label_numbers(labels), [row[0] if row else "" for row in labels]
    decisions = calibration.decide(hits, queries, features=features, labels=numbers, gallery_size=gallery_size)
    return decisions, calibration.unseen_p_values(decisions.score, first)

"""Qdrant: calibrate on an existing collection, and decide on its hits.

The collection must search by cosine, and have a label in each payload. A calibration does not hold for a part of the
collection, so `QdrantGallery` does not filter. `lam.retrieval.decisions.judge` has the requirements on hits.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lam.integrations.judging import label_of
from lam.retrieval import N_HITS, Calibration, Choices, calibrate_vectors, judge
from lam.retrieval.decisions.abstention import Decision
from lam.utils.checks import check_at_least
from lam.utils.extras import needs_extra
from lam.vmf.embeddings import Embeddings, check_embeddings

with needs_extra("qdrant", "Qdrant collections"):
    from qdrant_client import models

_PAGE = 1000  # points a request


@dataclass(frozen=True)
class Answer:
    """The answer to a query.

    Attributes:
        decision: match, unknown or abstain.
        probability: probability that the first point is right.
        kappa: concentration of the query; small means uncertain.
        points: the first points, best first, as Qdrant returns them.
    """

    decision: Decision
    probability: float
    kappa: float
    points: tuple[models.ScoredPoint, ...]


class QdrantGallery:
    """A collection of Qdrant as the gallery of lam's decisions.

    Args:
        client: a `qdrant_client.QdrantClient`, of a server or of the local mode.
        collection: name of an existing collection with distance Cosine.
        label: key of the payload that holds an item's label; `metadata.label` is the key `label` in `metadata`.
        vector: name of the vector, in a collection of named vectors.
        exact: whether to search exactly; a search by Qdrant's graph may miss hits, and needs a recall@50 above 0.95.

    Raises:
        ValueError: for a missing collection or vector, or a distance that is not Cosine.
    """

    def __init__(
        self, client: Any, collection: str, *, label: str = "label", vector: str | None = None, exact: bool = True
    ) -> None:
        self.client, self.collection = client, collection
        self._label, self._vector, self._exact = label, vector, exact
        if not client.collection_exists(collection):
            raise ValueError(f"there is no collection {collection!r}: create it with distance Cosine")
        vectors = client.get_collection(collection).config.params.vectors
        named: dict[str | None, Any] = {**vectors} if isinstance(vectors, Mapping) else {None: vectors}
        if vector not in named:
            raise ValueError(f"vector must be one of {list(named)} in {collection!r}, got {vector!r}")
        if (distance := named[vector].distance) != models.Distance.COSINE:
            raise ValueError(f"decisions need distance Cosine, {collection!r} has {distance.value}: make another one")
        self.dimension: int = named[vector].size
        self._searched = None
        if vector is not None:  # a point may lack one of the named vectors
            self._searched = models.Filter(must=[models.HasVectorCondition(has_vector=vector)])

    def __len__(self) -> int:
        return self.client.count(self.collection, count_filter=self._searched, exact=True).count

    def add(
        self,
        ids: Sequence[int | str],
        embeddings: Embeddings,
        labels: Sequence[str],
        payloads: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Add points; a point replaces an older one with its id. Each payload gets the label and `kappa`."""
        check_embeddings(embeddings)
        payloads = [{} for _ in ids] if payloads is None else payloads
        if {len(embeddings), len(labels), len(payloads)} != {len(ids)}:
            lengths = f"{len(ids)}, {len(embeddings)}, {len(labels)} and {len(payloads)}"
            raise ValueError(f"ids, embeddings, labels and payloads must be equal in number, got {lengths}")
        if embeddings.dimension != self.dimension:
            raise ValueError(f"embeddings must have dimension {self.dimension}, got {embeddings.dimension}")
        points = list[models.PointStruct]()
        means, kappas = embeddings.mean.tolist(), embeddings.kappa.tolist()
        for name, mean, kappa, label, payload in zip(ids, means, kappas, labels, payloads, strict=True):
            vector = mean if self._vector is None else {self._vector: mean}
            fields = {**_labelled(payload, self._label, label), "kappa": kappa}
            points.append(models.PointStruct(id=name, vector=vector, payload=fields))
        for start in range(0, len(points), _PAGE):
            self.client.upsert(self.collection, points[start : start + _PAGE], wait=True)

    def vectors(self) -> tuple[Float[Tensor, "G D"], list[str]]:
        """Vectors and labels of all points that have the vector; a missing label is empty."""
        pages, labels, offset = [torch.empty(0, self.dimension)], list[str](), None
        while True:
            points, offset = self.client.scroll(
                self.collection,
                self._searched,
                limit=_PAGE,
                offset=offset,
                with_payload=[self._label.partition(".")[0]],
                with_vectors=True if self._vector is None else [self._vector],
            )
            rows = [point.vector if self._vector is None else point.vector[self._vector] for point in points]
            pages.append(torch.tensor(rows).reshape(len(rows), self.dimension))
            labels += [self._label_of(point) for point in points]
            if offset is None:
                return torch.cat(pages), labels

    def calibrate(self, queries: Embeddings, labels: Sequence[str], choices: Choices | None = None) -> Calibration:
        """Calibrate on the collection; arguments and errors as in `lam.retrieval.calibrate_vectors`."""
        vectors, own = self.vectors()
        self._require_labels(own, at_most=0)
        return calibrate_vectors(queries, labels, vectors, own, choices)

    def answer(
        self, queries: Embeddings, calibration: Calibration, *, features: Float[Tensor, "Q P"] | None = None, k: int = 5
    ) -> list[Answer]:
        """Search for queries and decide on their hits; errors as in `lam.retrieval.judge`, or if no hit has a label.

        Args:
            features: (Q, P) features of the queries, from `Encoder.predict`; some scores need them.
            k: number of points in an answer, at least 1.
        """
        check_embeddings(queries)
        check_at_least("k", k, 1)
        if len(queries) == 0:
            return []
        how = models.SearchParams(exact=self._exact)
        requests = [
            models.QueryRequest(query=mean, using=self._vector, limit=max(k, N_HITS), params=how, with_payload=True)
            for mean in queries.mean.tolist()
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Local mode performs exact")  # the local mode has no graph to leave out
            found = [response.points for response in self.client.query_batch_points(self.collection, requests)]
        scores = [[point.score for point in points] for points in found]
        labels = [[self._label_of(point) for point in points] for points in found]
        every = [label for row in labels for label in row]
        self._require_labels(every, at_most=max(0, len(every) - 1))
        decisions = judge(calibration, queries, scores, labels, gallery_size=len(self), features=features)
        rows = zip(decisions.decision, decisions.probability.tolist(), queries.kappa.tolist(), found, strict=True)
        return [Answer(decision, share, kappa, tuple(points[:k])) for decision, share, kappa, points in rows]

    def _require_labels(self, labels: Sequence[str], *, at_most: int) -> None:
        if (n_missing := labels.count("")) > at_most:
            raise ValueError(
                f"{n_missing} of {len(labels)} points of {self.collection!r} have no {self._label!r} in their payload: "
                "give each a label, or name another key with QdrantGallery(..., label=KEY)"
            )

    def _label_of(self, point: Any) -> str:
        *above, last = self._label.split(".")
        fields: Any = point.payload
        for name in above:
            fields = fields.get(name) if isinstance(fields, Mapping) else None
        return label_of(fields if isinstance(fields, Mapping) else {}, last)


def _labelled(payload: Mapping[str, Any], key: str, label: str) -> dict[str, Any]:
    """The payload with a label under a key such as `metadata.label`."""
    name, _, below = key.partition(".")
    return {**payload, name: _labelled(payload.get(name) or {}, below, label) if below else label}

"""Searches of the gallery, and of the parts that pass filters, without HTTP and threads."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from jaxtyping import Int64

from lam.gallery.filters import Filter
from lam.gallery.gallery import Gallery, Matching, Place, nearest_by_label, places_of
from lam.gallery.item import ItemInfo
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.conformal import needed
from lam.retrieval.decisions.gallery_part import false_accepts, of_part
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.scores import N_HITS
from lam.runs.live import LiveQueries
from lam.service.answers import Responder, Verdict
from lam.service.models import SearchResponse
from lam.service.queries import Part, Query, Search
from lam.service.watch import Watch
from lam.service.workers import results_of
from lam.vmf.embeddings import Embeddings

_KEPT_PARTS = 16
_LOG = logging.getLogger(__name__)


class GallerySearch:
    """Searches a gallery; a responder makes the answers.

    Args:
        responder: makes answers by the present calibration; a new calibration replaces the responder.
        watch: counts the queries.
        live: the sample of queries to store, if any.
        judges_items: whether a search with a stored item as the query gets a decision.
        write: called when `Watch.write` is due.
    """

    def __init__(
        self,
        gallery: Gallery,
        responder: Responder,
        watch: Watch,
        *,
        live: LiveQueries | None,
        judges_items: bool,
        write: Callable[[], None],
    ) -> None:
        self.responder, self.live = responder, live
        self._gallery, self._watch, self._write = gallery, watch, write
        self._judges_items = judges_items
        self._calibrated = lru_cache(_KEPT_PARTS)(partial(_calibrated_part, gallery))

    def grouped(self, search: Search, answer: SearchResponse, size: int) -> SearchResponse:
        """The answer with groups instead of hits: at most `size` items of each of the nearest `search.k` labels."""
        part, query = search.part, _searchable(search.read().embedding)
        items = self._gallery.matching(Filter.parse("{}")) if part is None else part.matching

        def nearest(k: int, among: Int64[np.ndarray, " G"] | None) -> Hits:
            return self._gallery.nearest(query, k, items.keys if among is None and part is not None else among)

        groups = nearest_by_label(nearest, items, n_groups=search.k, size=size)
        keys = [place.key for group in groups for place in group]
        vectors = self._gallery.store.vectors_of(keys) if search.with_vector else {}
        return self.responder.grouped(search, answer, groups, self._gallery.store.infos_of(keys), vectors)

    def parts(self, jobs: Sequence[str]) -> list[Part | Exception]:
        """The part of the gallery that passes each filter, with its calibration, or the error of the filter."""
        return results_of(partial(self._part, job) for job in jobs)

    def _part(self, filter: str) -> Part:
        return self._calibrated(self._gallery.matching(Filter.parse(filter)), self.responder.calibration)

    def search(self, jobs: Sequence[Search]) -> list[SearchResponse | Exception]:
        """The answer to each search, or its error."""
        queries = results_of(job.read for job in jobs)
        valid = [(job, query) for job, query in zip(jobs, queries, strict=True) if isinstance(query, Query)]
        answers = iter(self._answers(*zip(*valid, strict=True)) if valid else ())
        return [query if isinstance(query, Exception) else next(answers) for query in queries]

    def _answers(self, jobs: Sequence[Search], queries: Sequence[Query]) -> list[SearchResponse | Exception]:
        answers: dict[int, SearchResponse | Exception] = {}
        for key, part in {id(job.part): job.part for job in jobs}.items():
            rows = [row for row, job in enumerate(jobs) if id(job.part) == key]
            chosen = [jobs[row] for row in rows], [queries[row] for row in rows]
            answers |= zip(rows, self._answers_in(part, *chosen), strict=True)
        for job, query in zip(jobs, queries, strict=True):
            if self.live is not None and query.features is not None and job.counted:
                logging_failure(partial(self.live.add, query.embedding, query.features))
        return [answers[row] for row in range(len(jobs))]

    def _answers_in(
        self, part: Part | None, jobs: Sequence[Search], queries: Sequence[Query]
    ) -> list[SearchResponse | Exception]:
        embeddings = Embeddings.concatenate([_searchable(query.embedding) for query in queries])
        responder = self.responder  # a SIGHUP may meanwhile set a responder that needs more hits
        least = 0 if responder.calibration is None else N_HITS
        most = max(max(least, job.k) + (job.without is not None) for job in jobs)
        hits, infos = self._gallery.search(embeddings, most, None if part is None else part.matching)
        shown = {key for row, job in enumerate(jobs) if job.with_vector for key in hits.ids[row, : job.k + 1].tolist()}
        vectors = self._gallery.store.vectors_of(shown) if shown else {}
        size = len(self._gallery)
        places, own = places_of(hits), dict[int, Hits]()
        together: dict[object, list[int]] = {}  # rows of queries of one kind, and each item that gets a decision
        for row, (job, query) in enumerate(zip(jobs, queries, strict=True)):
            if job.without is None:
                together.setdefault(_kind(query), []).append(row)
                continue
            own[row] = _without(hits[[row]], infos, job.without)
            (places[row],) = places_of(own[row])
            if self._judges_items:
                together[row] = [row]
        verdicts: dict[int, Verdict] = {}
        for rows in together.values():
            of_rows = own.get(rows[0], hits[rows])
            found = responder.verdicts(part, [queries[row] for row in rows], of_rows, infos)
            verdicts |= zip(rows, found, strict=False)
        answers = results_of(
            partial(responder.answer, job, query, found, infos, size=size, verdict=verdicts.get(row), vectors=vectors)
            for row, (job, query, found) in enumerate(zip(jobs, queries, places, strict=True))
        )
        if part is not None:
            return answers
        return [self._counted(*each, infos) for each in zip(jobs, answers, places, strict=True)]

    def _counted(
        self, job: Search, answer: SearchResponse | Exception, places: Sequence[Place], infos: Mapping[int, ItemInfo]
    ) -> SearchResponse | Exception:
        """The answer, with its id and the state of the promises if it is a decision on a new, counted query."""
        if isinstance(answer, Exception) or job.without is not None or answer.decision is None or not job.counted:
            return answer
        cosine, label = (places[0].score, infos[places[0].key].label) if places else (-1.0, "")
        if (counted := self._watch.count(answer.decision, answer.kappa, cosine, label)) is None:
            return answer
        answer_id, promise, is_due = counted
        if is_due:
            self._write()
        return answer.model_copy(update={"answer_id": answer_id, "promise": promise})


def _calibrated_part(gallery: Gallery, matching: Matching, calibration: Calibration | None) -> Part:
    calibrated = None
    if calibration is not None:
        scores = false_accepts(
            calibration,
            partial(gallery.nearest, among=matching.keys),
            torch.tensor(matching.keys),
            torch.tensor(matching.labels),
        )
        if scores is not None and scores.n_units >= needed(calibration.targets.far):
            calibrated = of_part(calibration, scores, len(matching))
    return Part(matching, calibrated)


def logging_failure(keep: Callable[[], None]) -> None:
    """Call `keep`, which stores live queries, and log a failure."""
    try:
        keep()
    except OSError as error:
        _LOG.error("the live queries are not kept: %s", error)


def _kind(query: Query) -> tuple[object, ...]:
    """The kind of a query; decisions on queries of one kind can be made together."""
    return query.features is None, query.embedding.has_parts, query.embedding.mean_samples


def _searchable(embedding: Embeddings) -> Embeddings:
    """An embedding without parts of κ. Embeddings from clients lack these, so all can share a batch."""
    return Embeddings(embedding.mean, embedding.kappa, embedding.resultant, embedding.variance)


def _without(hits: Hits, infos: Mapping[int, ItemInfo], item_id: str) -> Hits:
    """The hits of one query, except this item."""
    kept = torch.tensor([infos[key].id != item_id for key in hits.ids[0].tolist()], dtype=torch.bool)
    return hits[:, kept]

"""The service without HTTP: from an image, a text or an embedding to an answer, through batching workers.

Each kind of work has a thread, so it does not wait for another kind. The threads list the gallery, read JSON and single
items, decode, run the network, apply filters, search, and write.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from lam.encoders.base import Encoder
from lam.gallery.embed import is_cut, takes_texts
from lam.gallery.filters import Filter
from lam.gallery.groups import nearest_by_label
from lam.gallery.local_index import require_faiss
from lam.gallery.operations import Change, Operation
from lam.gallery.refusal import Refusal, busy, full, read_only
from lam.gallery.store import HitInfo
from lam.inputs import Preprocessing, TextPreprocessing
from lam.inputs.thumbnails import thumbnail
from lam.retrieval.decisions.conformal import needed
from lam.retrieval.decisions.gallery_part import false_accepts, of_part
from lam.retrieval.index.checks import unit_vectors
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.hit_scores import N_HITS
from lam.runs.backup import Backup, back_up
from lam.runs.finished import Run
from lam.runs.folder import WATCH
from lam.runs.live import LiveQueries
from lam.service.answers import Responder, Verdict
from lam.service.errors import ServiceError
from lam.service.images import read_image
from lam.service.models import FeedbackResponse, SearchResponse
from lam.service.queries import Part, Query, Search
from lam.service.settings import ServiceSettings
from lam.service.tracing import stage
from lam.service.watch import Feedback, Watch
from lam.service.workers import Worker, require_room
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

Job = TypeVar("Job")
Value = TypeVar("Value")
_WARM_UPS = 3
_KEPT_PARTS = 16
_LOG = logging.getLogger(__name__)


Decoded = tuple[Tensor, dict[str, Any]]
"""An input of the network, and fields of its `Query`: thumbnail, text, text_cut."""


class Engine:
    """An opened run: its encoder, its gallery and its calibration, if any.

    Args:
        run: the run's folder.
        settings: limits.
        device: device of the network.
        drop_corrupt, index: see `lam.gallery.gallery.Gallery`.
        replica: whether another process serves the run, and this one only reads; see `lam.gallery.replica.Replica`.
        threads: threads of the network, and of a search; other work, and this thread, then use one. None: no change.

    Raises:
        CorruptFileError: naming the file that is missing, truncated or altered.
        ValueError: for a folder that is no finished run, or that another process serves, or a missing device.
    """

    def __init__(
        self,
        run: str | Path,
        settings: ServiceSettings | None = None,
        *,
        device: str = "cpu",
        drop_corrupt: bool = False,
        index: str | None = None,
        replica: bool = False,
        threads: int | None = None,
    ) -> None:
        self.run = Run(run)
        self.settings = ServiceSettings() if settings is None else settings
        self.replica = replica
        if replica and self.settings.keep_queries is not None:
            raise ValueError("a replica writes nothing: let the service without --replica keep queries")
        require_faiss()
        self.encoder = _move_to(self.run.encoder, device)
        self.device = device
        self.samples = self.run.samples
        self.live: LiveQueries | None = None
        self.responder = self._responder()
        open_gallery = self.run.open_replica if replica else partial(self.run.open_gallery, drop_corrupt=drop_corrupt)
        self.gallery = open_gallery(index=index)
        self._known_parts: dict[str, Part] = {}
        self.watch = self._watch()
        self._counts = False
        self._start(threads)
        self._warm_up()
        self._counts = True
        if (keep := self.settings.keep_queries) is not None:
            self.live = LiveQueries(self.run, keep)

    def _start(self, threads: int | None) -> None:
        """Start the workers. In OpenMP each calling thread has its own number of threads, so each worker sets it."""
        settings = self.settings
        one, several, searching = None, None, None
        if threads:
            one, several = _set_threads, partial(torch.set_num_threads, threads)
            searching = partial(_set_threads, faiss_threads=threads)
            one()
        self.lister: Worker[Callable[[], Any], Any] = Worker("listing", _results, queue=settings.queue)
        self.reader: Worker[Callable[[], Any], Any] = Worker("reading", _results, queue=settings.queue)
        self.decoder: Worker[tuple[bytes | str, bool], Decoded] = Worker(
            "decoding", self._decode, queue=settings.queue, begin=one
        )
        self.network: Worker[Tensor, Query] = Worker(
            "network",
            self._embed,
            batch=settings.batch,
            wait=settings.batch_seconds,
            queue=settings.queue,
            begin=several,
        )
        self.filterer: Worker[str, Part] = Worker("filter", self._parts, queue=settings.queue, begin=one)
        self.searcher: Worker[Search, SearchResponse] = Worker(
            "search", self._search, batch=settings.batch, queue=settings.queue, begin=searching
        )
        self.writer: Worker[Operation, Change] = Worker(
            "store", self.gallery.write, batch=8 * settings.batch, queue=settings.queue
        )
        self._backups: Worker[Path, Backup] = Worker("backup", self._back_up, queue=1)
        self.watcher: Worker[Callable[[], Any], Any] = Worker("feedback", _results, queue=settings.queue, begin=one)

    def _watch(self) -> Watch:
        """The watch over the promise; a replica keeps its own in memory."""
        try:
            return Watch(None if self.replica else self.run.folder / WATCH, self.responder.calibration)
        except BaseException:
            self.gallery.close()
            raise

    def _warm_up(self) -> None:
        """Embed and search blank inputs: everything is then loaded, and the time of a batch is known."""
        self.responder.credible_cosine(1.0)
        shape = None if self.encoder.preprocessing is None else self.encoder.preprocessing.shape
        if shape is None:
            return
        dtype = torch.uint8 if isinstance(self.encoder.preprocessing, TextPreprocessing) else torch.float32
        for _ in range(_WARM_UPS):
            with suppress(Refusal, ServiceError):
                query = self.network.submit(torch.zeros(*shape, dtype=dtype)).result(self.settings.answer_seconds)
                self.searcher.submit(Search(query, 1)).result()

    def recalibrate(self) -> None:
        """Read the run's calibration again.

        Raises:
            CorruptFileError, ValueError, OSError: for one that cannot be read; the old one stays.
        """
        self.responder = self._responder()
        try:
            self.watcher.submit(partial(self.watch.renew, self.responder.calibration)).result()
        except Refusal as error:
            _LOG.error("the promise of the new calibration is not stored: %s", error)

    def _responder(self) -> Responder:
        return Responder(self.run.calibration, self.encoder.kappa_dimension, self.encoder.ambiguity)

    @property
    def takes_texts(self) -> bool:
        """Whether inputs of the run are texts."""
        return takes_texts(self.encoder)

    @property
    def workers(self) -> tuple[Worker[Any, Any], ...]:
        """The workers, in the order of a request."""
        return (
            self.lister,
            self.reader,
            self.decoder,
            self.network,
            self.filterer,
            self.searcher,
            self.writer,
            self.watcher,
        )

    @property
    def complaints(self) -> list[str]:
        """Why the service is not ready; empty if it is."""
        complaints = [*(worker.complaint for worker in self.workers), self.gallery.complaint]
        return [complaint for complaint in complaints if complaint is not None]

    def admit(self, *workers: Worker[Any, Any]) -> None:
        """Refuse, before any work, a change of a replica, and as `busy` a request that would wait too long here."""
        if self.replica and self.writer in workers:
            raise read_only()
        require_room(workers, self.settings.patience)

    async def list_items(self, job: Callable[[], Value]) -> Value:
        """Do a job over many items in the thread of listings, which blocks no other work."""
        return await self._done(self.lister, job)

    async def read(self, job: Callable[[], Value]) -> Value:
        """Do a job on JSON or on single items outside of the event loop, which it would block."""
        return await self._done(self.reader, job)

    async def embed(self, body: Query | bytes | str, *, with_thumbnail: bool = False) -> Query:
        """Embed a JPEG, PNG or WebP file or a text; an embedding is returned unchanged.

        Raises:
            ServiceError: for other content.
            Refusal: `busy`, if too many requests wait.
        """
        if isinstance(body, Query):
            return body
        tensor, fields = await self._done(self.decoder, (body, with_thumbnail))
        return replace(await self._done(self.network, tensor), **fields)

    async def search(self, search: Search) -> SearchResponse:
        """Find the nearest items, and decide.

        Raises:
            Refusal: `busy`, if too many requests wait.
            ServiceError: from reading the query.
        """
        return await self._done(self.searcher, search)

    async def embed_all(
        self, bodies: Sequence[Query | bytes | str | ServiceError], *, with_thumbnail: bool = False
    ) -> list[Query | ServiceError | BaseException]:
        """Embed the images and texts of a batch, or the error of each; others' requests are embedded in between.

        Raises:
            Refusal: `busy`, before any work, if too many requests wait.
        """
        seconds = self.decoder.seconds_a_job + self.network.seconds_a_job
        most = self.settings.patience / 2 / seconds if seconds else 1
        room = asyncio.Semaphore(max(1, min(self.settings.batch, int(most))))

        async def embed(body: bytes | str) -> Query:
            async with room:
                return await self.embed(body, with_thumbnail=with_thumbnail)

        inputs = [body for body in bodies if isinstance(body, bytes | str)]
        if inputs:
            self.admit(self.decoder, self.network)
        found = iter(await asyncio.gather(*map(embed, inputs), return_exceptions=True))
        return [next(found) if isinstance(body, bytes | str) else body for body in bodies]

    async def search_all(self, searches: Sequence[Search]) -> list[SearchResponse | BaseException]:
        """The answers to several searches, or the error of each; others' searches run in between."""
        answers: list[SearchResponse | BaseException] = []
        for start in range(0, len(searches), self.settings.batch):
            batch = searches[start : start + self.settings.batch]
            try:
                answers += await self._in_time(self.searcher, partial(self._submit_all, batch))
            except Refusal as refusal:
                answers += [refusal] * len(batch)
        return answers

    def _submit_all(self, searches: Sequence[Search]) -> "asyncio.Future[list[SearchResponse | BaseException]]":
        futures = self.searcher.submit_all(searches)
        return asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)

    async def grouped(self, search: Search, answer: SearchResponse, *, size: int) -> SearchResponse:
        """The answer with the nearest items of `search.k` labels, at most `size` of each, instead of the hits."""
        return await self.list_items(partial(self._grouped, search, answer, size))

    def _grouped(self, search: Search, answer: SearchResponse, size: int) -> SearchResponse:
        part, query = search.part, _searchable(search.read().embedding)
        items = self.gallery.matching(Filter.parse("{}")) if part is None else part.matching

        def nearest(k: int, among: Int64[np.ndarray, " G"] | None) -> Hits:
            return self.gallery.nearest(query, k, items.keys if among is None and part is not None else among)

        groups = nearest_by_label(nearest, items, n_groups=search.k, size=size)
        keys = [place.key for group in groups for place in group]
        vectors = self.gallery.vectors_of(keys) if search.with_vector else {}
        return self.responder.grouped(search, answer, groups, self.gallery.hit_infos(keys), vectors)

    async def part(self, filter: str) -> Part:
        """The part of the gallery that passes a filter in JSON, with its calibration.

        Raises:
            Refusal: `invalid`, for anything but a filter; `busy`, for one that takes too long.
        """
        return await self._done(self.filterer, filter)

    async def write(self, operation: Operation) -> Change:
        """Put or delete an item; on return the change is durable.

        Raises:
            Refusal: `full`, if the change could not be stored; `busy`, if too many requests wait.
        """
        # shielded: a client that goes away must not cancel a batch with changes of others
        return await asyncio.shield(self._done(self.writer, operation))

    async def back_up(self) -> Backup:
        """Copy the run into a new folder beside it, whose name is made here.

        Raises:
            Refusal: `full`, if the copy could not be written; `busy`, while backups wait; `conflict`, while the run is
                being calibrated or indexed, or a file of it was altered.
        """
        folder, moment = self.run.folder.absolute(), datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        name = f"{folder.name}-backup-{moment}-{secrets.token_hex(3)}"
        return await asyncio.wrap_future(self._backups.submit(folder.with_name(name)))

    def _back_up(self, jobs: Sequence[Path]) -> list[Backup | Exception]:
        try:
            return [back_up(self.run.folder, folder) for folder in jobs]
        except OSError as error:
            return [full(str(error))]
        except ValueError as error:
            return [Refusal("conflict", str(error), allowed="another try once this is resolved")]

    async def judge(self, feedback: Feedback) -> FeedbackResponse:
        """Count feedback on an answer; on return it is durable.

        Raises:
            ServiceError: for an unknown answer, or one that was judged before.
            Refusal: `full`, if it could not be stored; `busy`, if too many requests wait.
        """
        job = partial(self.watch.judge, feedback, self.gallery.has_label)
        counted, promise = await asyncio.shield(self._done(self.watcher, job))
        return FeedbackResponse(counted=counted, promise=promise)

    def close(self) -> None:
        """Finish the waiting jobs, and release the folder."""
        for worker in self.workers:
            worker.close()
        self._backups.close(timeout=0.0)  # an unfinished backup is no backup: its folder has a temporary name
        if self.live is not None:
            _logging_failure(self.live.write)
        self.watch.close()
        self.gallery.close()

    async def _done(self, worker: Worker[Job, Value], job: Job) -> Value:
        return await self._in_time(worker, lambda: asyncio.wrap_future(worker.submit(job)))

    async def _in_time(self, worker: Worker[Any, Any], submit: Callable[[], "asyncio.Future[Value]"]) -> Value:
        try:
            with stage(worker.name):
                return await asyncio.wait_for(submit(), self.settings.answer_seconds)
        except TimeoutError:
            raise busy(f"there was no answer within {self.settings.answer_seconds:g} s") from None

    def _decode(self, jobs: Sequence[tuple[bytes | str, bool]]) -> list[Decoded]:
        ((body, with_thumbnail),) = jobs  # one at a time: an error belongs to one request
        preprocessing = self.encoder.preprocessing
        if isinstance(body, str) or isinstance(preprocessing, TextPreprocessing):
            return [self._read_text(body)]
        if not isinstance(preprocessing, Preprocessing):
            raise ServiceError(422, "this run does not know how an image becomes an input", allowed="embeddings")
        image = read_image(body, self.settings, least=preprocessing.reduced_to)
        try:
            return [(preprocessing(image), {"thumbnail": thumbnail(image) if with_thumbnail else None})]
        except ValueError as error:
            raise ServiceError(
                422, f"the image cannot become an input: {error}", allowed="an ordinary photograph"
            ) from None

    def _read_text(self, text: bytes | str) -> Decoded:
        preprocessing = self.encoder.preprocessing
        if not isinstance(preprocessing, TextPreprocessing):
            raise no_texts()
        if isinstance(text, bytes):
            raise ServiceError(422, "this run takes no images", allowed='{"text": "..."} or embeddings')
        try:
            cut = is_cut(self.encoder.network, preprocessing, text)
            return preprocessing(text), {"text": preprocessing.kept(text), "text_cut": cut}
        except ValueError as error:
            raise ServiceError(422, str(error), allowed="a text that is not empty") from None

    def _embed(self, tensors: Sequence[Tensor]) -> list[Query | Exception]:
        results: dict[int, Query | Exception] = {}
        for shape in {tensor.shape for tensor in tensors}:
            rows = [row for row, tensor in enumerate(tensors) if tensor.shape == shape]
            results |= zip(rows, self._embedded(torch.stack([tensors[row] for row in rows])), strict=True)
        return [results[row] for row in range(len(tensors))]

    def _embedded(self, batch: Tensor) -> list[Query | Exception]:
        try:
            prediction = self.encoder.predict(batch.to(self.device))
        except ValueError:
            if len(batch) > 1:
                raise  # the worker then tries each job alone
            return [_no_embedding()]
        except RuntimeError as error:
            raise self._lost(error) from error
        embeddings, features = prediction.embeddings.to("cpu"), prediction.features.cpu()
        return [_query(embeddings[row : row + 1], features[row : row + 1]) for row in range(len(batch))]

    def _lost(self, error: RuntimeError) -> Exception:
        """The error that a batch reports when its device fails; after a GPU fails, the network runs on the CPU."""
        if self.device != "cpu":
            _LOG.error("the network goes on without %s: %s", self.device, error)
            self.encoder, self.device = Run(self.run.folder).encoder, "cpu"
            return busy("the device of the network was lost; it goes on without")
        if "memory" in str(error):
            return busy("there is not enough memory for this batch")
        return error

    def _parts(self, jobs: Sequence[str]) -> list[Part | Exception]:
        return _results(partial(self._part, job) for job in jobs)

    def _part(self, filter: str) -> Part:
        where, calibration = Filter.parse(filter), self.responder.calibration
        matching, known = self.gallery.matching(where), self._known_parts.get(where.text)
        if known is not None and known.matching is matching and known.base is calibration:
            return known
        own = None
        if calibration is not None:
            scores = false_accepts(
                calibration,
                partial(self.gallery.nearest, among=matching.keys),
                lambda ids: torch.from_numpy(matching.labels[matching.keys.searchsorted(ids.numpy())]),
                len(matching),
            )
            if scores is not None and scores.n_units >= needed(calibration.targets.far):
                own = of_part(calibration, scores, len(matching))
        self._known_parts[where.text] = part = Part(matching, calibration, own)
        while len(self._known_parts) > _KEPT_PARTS:
            del self._known_parts[next(iter(self._known_parts))]
        return part

    def _search(self, jobs: Sequence[Search]) -> list[SearchResponse | Exception]:
        queries = _results(job.read for job in jobs)
        valid = [(job, query) for job, query in zip(jobs, queries, strict=True) if isinstance(query, Query)]
        answers = iter(self._answers(*zip(*valid, strict=True)) if valid else ())
        return [query if isinstance(query, Exception) else next(answers) for query in queries]

    def _answers(self, jobs: Sequence[Search], queries: Sequence[Query]) -> list[SearchResponse | Exception]:
        answers: dict[int, SearchResponse | Exception] = {}
        for key, part in {id(job.part): job.part for job in jobs}.items():
            rows = [row for row, job in enumerate(jobs) if id(job.part) == key]
            chosen = [jobs[row] for row in rows], [queries[row] for row in rows]
            answers |= zip(rows, self._answers_in(part, *chosen), strict=True)
        for query in queries:
            if self.live is not None and query.features is not None:
                _logging_failure(partial(self.live.add, query.embedding, query.features))
        return [answers[row] for row in range(len(jobs))]

    def _answers_in(
        self, part: Part | None, jobs: Sequence[Search], queries: Sequence[Query]
    ) -> list[SearchResponse | Exception]:
        embeddings = Embeddings.concatenate([_searchable(query.embedding) for query in queries])
        responder = self.responder  # a SIGHUP may replace it meanwhile by one that needs more hits
        least = 0 if responder.calibration is None else N_HITS
        most = max(max(least, job.k) + (job.without is not None) for job in jobs)
        hits, infos = self.gallery.search(embeddings, most, None if part is None else part.matching)
        shown = {key for row, job in enumerate(jobs) if job.with_vector for key in hits.ids[row, : job.k + 1].tolist()}
        vectors = self.gallery.vectors_of(shown) if shown else {}
        size = len(self.gallery)
        verdicts: dict[int, Verdict] = {}
        for kind in {_kind(query) for query in queries}:
            rows = [row for row, job in enumerate(jobs) if job.without is None and _kind(queries[row]) == kind]
            if rows:
                chosen = [queries[row] for row in rows]
                verdicts |= zip(rows, responder.verdicts(part, chosen, hits[torch.tensor(rows)], infos), strict=False)
        answers = _results(
            partial(
                responder.answer,
                job,
                query,
                hits[row : row + 1] if job.without is None else _without(hits[row : row + 1], infos, job.without),
                infos,
                size=size,
                judged=job.without is None or not self.run.has_answers,
                verdict=verdicts.get(row),
                vectors=vectors,
            )
            for row, (job, query) in enumerate(zip(jobs, queries, strict=True))
        )
        if part is not None or not self._counts:
            return answers
        firsts = [hits[row : row + 1, :1] for row in range(len(jobs))]
        return [self._counted(*each, infos) for each in zip(jobs, answers, firsts, strict=True)]

    def _counted(
        self, job: Search, answer: SearchResponse | Exception, first: Hits, infos: Mapping[int, HitInfo]
    ) -> SearchResponse | Exception:
        """The answer with its id and the state of the promises, if it is about a new query and has a decision."""
        if isinstance(answer, Exception) or job.without is not None or answer.decision is None:
            return answer
        labels = [infos[key].label for key in first.ids.flatten().tolist()]
        cosine, label = (float(first.scores[0, 0]), labels[0]) if labels else (-1.0, "")
        answer_id, promise, is_due = self.watch.count(answer.decision, answer.kappa, cosine, label)
        if is_due:
            with suppress(Refusal):
                self.watcher.submit(self.watch.write)
        return answer.model_copy(update={"answer_id": answer_id, "promise": promise})


def _logging_failure(keep: Callable[[], None]) -> None:
    """Keep live queries; a failure is only logged."""
    try:
        keep()
    except OSError as error:
        _LOG.error("the live queries are not kept: %s", error)


def _results(jobs: Iterable[Callable[[], Value]]) -> list[Value | Exception]:
    """The result of each job, or its exception."""
    results: list[Value | Exception] = []
    for job in jobs:
        try:
            results.append(job())
        except Exception as error:
            results.append(error)
    return results


def embedding_of(mean: Tensor, kappa: float) -> Embeddings:
    """Embedding of one item from a unit vector (D,) and κ, clamped to `KAPPA_RANGE`."""
    within = torch.tensor([kappa], dtype=torch.float64).clamp(*KAPPA_RANGE)
    return Embeddings(mean[None], within, torch.ones_like(within), torch.zeros_like(within))


def _query(embedding: Embeddings, features: Tensor) -> Query | Exception:
    try:
        unit_vectors(embedding, embedding.dimension)
    except ValueError:
        return _no_embedding()
    return Query(embedding, features)


def no_texts() -> ServiceError:
    """The refusal of a text by a run on images."""
    return ServiceError(422, "this run takes no texts", allowed="images or embeddings")


def _no_embedding() -> ServiceError:
    return ServiceError(422, "the input has no finite embedding with a direction", allowed="an ordinary input")


def _kind(query: Query) -> tuple[object, ...]:
    """Queries of one kind can be decided together."""
    return query.features is None, query.embedding.has_parts, query.embedding.mean_samples


def _searchable(embedding: Embeddings) -> Embeddings:
    """An embedding without samples and parts of κ. Embeddings from clients have neither, and share the batch."""
    return Embeddings(embedding.mean, embedding.kappa, embedding.resultant, embedding.variance)


def _without(hits: Hits, infos: Mapping[int, HitInfo], item_id: str) -> Hits:
    """The hits of one query without an item."""
    kept = torch.tensor([infos[key].id != item_id for key in hits.ids[0].tolist()], dtype=torch.bool)
    return hits[:, kept]


def _move_to(encoder: Encoder, device: str) -> Encoder:
    try:
        return encoder.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the network cannot be moved to device {device!r}: {error}") from None


def _set_threads(faiss_threads: int = 1) -> None:
    """Give this thread one thread of torch."""
    import faiss

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(faiss_threads)

"""The service without HTTP: `Engine` answers queries; its workers do jobs in batches.

Each kind of work has its own worker thread, so no kind waits for another: listing the gallery, reading JSON and items,
decoding, the network, filters, searches, writes, feedback and backups.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lam.gallery.local_index import require_faiss
from lam.gallery.operations import Change, Operation
from lam.gallery.refusal import Refusal, busy, full, read_only
from lam.runs.backup import Backup, back_up
from lam.runs.finished import Run
from lam.runs.folder import WATCH
from lam.runs.live import LiveQueries
from lam.service.answers import Responder
from lam.service.bodies import JsonLimits
from lam.service.embedder import Embedder
from lam.service.gallery_search import GallerySearch, logging_failure
from lam.service.models import FeedbackResponse, SearchResponse
from lam.service.queries import Query, Search
from lam.service.settings import ServiceSettings
from lam.service.tracing import stage
from lam.service.watch import Watch
from lam.service.workers import Worker, require_room, results_of

Job = TypeVar("Job")
Value = TypeVar("Value")
_WARM_UPS = 3
_LOG = logging.getLogger(__name__)


class Engine:
    """An opened run: its encoder, its gallery and its calibration, if any.

    If too many requests wait, or an answer takes too long, the engine's coroutines raise a `busy` refusal.

    Args:
        drop_corrupt, index: see `lam.gallery.gallery.Gallery`.
        replica: whether another process serves the run, and this one only reads it; see `lam.gallery.replica.Replica`.
        threads: threads of torch for the network, and of FAISS for a search; other work gets one thread. None keeps
            the defaults.

    Raises:
        CorruptFileError: for a file that is missing, truncated or altered.
        ValueError: if the folder is not a finished run, another process serves the run, or the device is missing.
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
        self.settings = settings = ServiceSettings() if settings is None else settings
        self.replica = replica
        if replica and (drop_corrupt or settings.keep_queries is not None):
            raise ValueError(
                "a replica writes nothing: let a service without --replica keep queries and drop altered rows"
            )
        require_faiss()
        self.embedder = Embedder(self.run, settings, device)
        self.samples = self.run.samples
        dimension = self.embedder.encoder.dimension
        max_json = settings.max_json + 32 * dimension  # 32 characters for each number of an embedding
        self.json_limits = JsonLimits(dimension, max_json, settings.max_batch, settings.max_batch_json)
        _ = self.run.fingerprint, self.run.gallery_kind  # read now for `GET /v1/model`: later the folder may be gone
        responder = self._responder()
        live = None if settings.keep_queries is None else LiveQueries(self.run, settings.keep_queries)
        with ExitStack() as opened:  # after an error, a service that keeps its old run can open this one later
            gallery = self.run.open_gallery(drop_corrupt=drop_corrupt, index=index, replica=replica)
            self.gallery = opened.enter_context(closing(gallery))
            self.watch = Watch(None if replica else self.run.folder / WATCH, responder.calibration)
            opened.enter_context(closing(self.watch))
            self.searches = GallerySearch(
                self.gallery,
                responder,
                self.watch,
                live=live,
                judges_items=not self.run.has_answers,
                write=self._write_watch,
            )
            if live is not None:
                opened.callback(logging_failure, live.write)
            self._start(threads)
            opened.callback(self._backups.close, timeout=0.0)  # an unfinished backup has a temporary name
            for worker in reversed(self.workers):
                opened.callback(worker.close)
            self._warm_up()
            self._opened = opened.pop_all()

    def _start(self, threads: int | None) -> None:
        """Start the workers, in the order of a request. Each sets OpenMP's number of threads for its own thread."""
        settings, queue = self.settings, self.settings.queue
        one, several, searching = None, None, None
        if threads:
            one, several = _set_threads, partial(torch.set_num_threads, threads)
            searching = partial(_set_threads, faiss_threads=threads)
            one()
        size, wait = settings.batch, settings.batch_seconds
        self.lister: Worker[Callable[[], Any], Any] = Worker("listing", results_of, queue=queue)
        self.reader: Worker[Callable[[], Any], Any] = Worker("reading", results_of, queue=queue)
        self.decoder = Worker("decoding", self.embedder.decode, queue=queue, begin=one)
        self.network = Worker("network", self.embedder.embed, queue=queue, batch=size, wait=wait, begin=several)
        self.filterer = Worker("filter", self.searches.parts, queue=queue, begin=one)
        self.searcher = Worker("search", self.searches.search, queue=queue, batch=size, begin=searching)
        self.writer = Worker("store", self.gallery.write, queue=queue, batch=8 * size)
        self.watcher: Worker[Callable[[], Any], Any] = Worker("feedback", results_of, queue=queue, begin=one)
        self._backups = Worker("backup", self._back_up, queue=1)
        before_search = (self.lister, self.reader, self.decoder, self.network, self.filterer)
        self.workers: tuple[Worker[Any, Any], ...] = (*before_search, self.searcher, self.writer, self.watcher)

    def _warm_up(self) -> None:
        """Embed and search blank inputs, to load everything and to measure the time of a batch."""
        self.responder.credible_cosine(1.0)
        blank = self.embedder.blank
        if blank is None:
            return
        for _ in range(_WARM_UPS):
            with suppress(Refusal):
                query = self.network.submit(blank).result(self.settings.answer_seconds)
                self.searcher.submit(Search(query, 1, counted=False)).result()

    def recalibrate(self) -> None:
        """Read the run's calibration again; if reading raises a `ValueError` or an `OSError`, the old one stays."""
        self.searches.responder = self._responder()
        try:
            self.watcher.submit(partial(self.watch.renew, self.responder.calibration)).result()
        except Refusal as error:
            _LOG.error("the promise of the new calibration is not stored: %s", error)

    @property
    def responder(self) -> Responder:
        """The responder, with the present calibration."""
        return self.searches.responder

    def _responder(self) -> Responder:
        encoder = self.embedder.encoder
        return Responder(self.run.calibration, encoder.kappa_dimension, encoder.ambiguity)

    def _write_watch(self) -> None:
        with suppress(Refusal):
            self.watcher.submit(self.watch.write)

    @property
    def complaints(self) -> list[str]:
        """Why the service is not ready; empty if it is."""
        complaints = [*(worker.complaint for worker in self.workers), self.gallery.complaint]
        return [complaint for complaint in complaints if complaint is not None]

    def admit(self, *workers: Worker[Any, Any]) -> None:
        """Refuse a request: as `read_only` if a replica would write, as `busy` if these workers have too much work."""
        if self.replica and self.writer in workers:
            raise read_only()
        require_room(workers, self.settings.patience)

    @property
    def _together(self) -> int:
        """Number of parts of a request that are submitted together; a queue must have room for them."""
        return min(self.settings.batch, self.settings.queue)

    async def do(self, worker: Worker[Job, Value], job: Job) -> Value:
        """Do a job in the thread of a worker.

        The lister does jobs on many items, and delays no searches; the reader does jobs on JSON or single items that
        would block the event loop.
        """
        return await self._in_time(worker, lambda: asyncio.wrap_future(worker.submit(job)))

    async def embed(self, body: Query | bytes | str, *, with_thumbnail: bool = False) -> Query:
        """Embed a JPEG, PNG or WebP file or a text (a `Refusal` for other content); return a query unchanged."""
        if isinstance(body, Query):
            return body
        tensor, fields = await self.do(self.decoder, (body, with_thumbnail))
        return replace(await self.do(self.network, tensor), **fields)

    async def embed_all(
        self, bodies: Sequence[Query | bytes | str | Exception], *, with_thumbnail: bool = False
    ) -> list[Query | BaseException]:
        """The query for each image, text or query of a batch, or its error. Other requests are embedded in between."""
        seconds = self.decoder.seconds_a_job + self.network.seconds_a_job
        most = self.settings.patience / 2 / seconds if seconds else 1
        room = asyncio.Semaphore(max(1, min(self._together, int(most))))

        async def embed(body: bytes | str) -> Query:
            async with room:
                return await self.embed(body, with_thumbnail=with_thumbnail)

        inputs = [body for body in bodies if isinstance(body, bytes | str)]
        if inputs:
            self.admit(self.decoder, self.network)
        found = iter(await asyncio.gather(*map(embed, inputs), return_exceptions=True))
        return [next(found) if isinstance(body, bytes | str) else body for body in bodies]

    async def search_all(self, searches: Sequence[Search]) -> list[SearchResponse | BaseException]:
        """The answer to each search, or its error. Other requests are searched in between."""
        answers: list[SearchResponse | BaseException] = []
        for start in range(0, len(searches), self._together):
            batch = searches[start : start + self._together]
            try:
                answers += await self._in_time(self.searcher, partial(self._answers, batch))
            except Refusal as refusal:
                answers += [refusal] * len(batch)
        return answers

    async def _answers(self, searches: Sequence[Search]) -> list[SearchResponse | BaseException]:
        futures = self.searcher.submit_all(searches)
        try:  # a worker does its jobs in their order, so the last one is done last
            await asyncio.gather(asyncio.wrap_future(futures[-1]), return_exceptions=True)
        finally:
            for future in futures:
                future.cancel()
        return [future.exception() or future.result() for future in futures]

    async def write(self, operation: Operation) -> Change:
        """Change items; on return the change is on disk. A change that cannot be stored is refused as `full`."""
        # shielded: a client that goes away must not cancel a batch with changes of others
        return await asyncio.shield(self.do(self.writer, operation))

    async def back_up(self) -> Backup:
        """Copy the run into a new folder beside it, named by time.

        Raises:
            Refusal: `full`, if the copy cannot be written; `busy`, if another backup waits; 409, if the run is
                being calibrated or indexed, one of its files was altered, or its folder was moved or replaced.
        """
        if not self.run.is_in_place:
            what = f"the served folder was moved from {self.run.folder} or replaced"
            raise Refusal(409, what, allowed="POST /v1/reload, or another try once the folder is back")
        folder, moment = self.run.folder.absolute(), datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        name = f"{folder.name}-backup-{moment}-{secrets.token_hex(3)}"
        return await asyncio.wrap_future(self._backups.submit(folder.with_name(name)))

    def _back_up(self, jobs: Sequence[Path]) -> list[Backup | Exception]:
        try:
            return [back_up(self.run.folder, folder) for folder in jobs]
        except OSError as error:
            return [full(str(error))]
        except ValueError as error:
            return [Refusal(409, str(error), allowed="another try once this is resolved")]

    async def judge(self, answer_id: str, label: str | None, correct: bool | None) -> FeedbackResponse:
        """Count feedback on an answer; on return the feedback is on disk. Arguments and errors as in `Watch.judge`."""
        job = partial(self.watch.judge, answer_id, label, correct, holds=self.gallery.store.has_label)
        counted, promise = await asyncio.shield(self.do(self.watcher, job))
        return FeedbackResponse(counted=counted, promise=promise)

    def close(self) -> None:
        """Finish the waiting jobs, and release the folder."""
        self._opened.close()

    async def _in_time(self, worker: Worker[Any, Any], submit: Callable[[], Awaitable[Value]]) -> Value:
        try:
            with stage(worker.name):
                return await asyncio.wait_for(submit(), self.settings.answer_seconds)
        except TimeoutError:
            raise busy(f"there was no answer within {self.settings.answer_seconds:g} s") from None


def _set_threads(faiss_threads: int = 1) -> None:
    """Limit the calling thread to one thread in torch, and to `faiss_threads` in FAISS."""
    import faiss

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(faiss_threads)

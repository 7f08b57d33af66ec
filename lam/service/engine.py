"""The service without HTTP: from a request's image or embedding to an answer, through workers that batch.

Six threads, each for one thing, so that none waits for another's kind of work: one lists the gallery, one reads JSON
and single items, one decodes, one runs the network, one searches, one writes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lam.encoders.base import Encoder
from lam.gallery.embed import is_cut
from lam.gallery.local_index import require_faiss
from lam.gallery.refusal import Refusal, busy
from lam.gallery.store import Change, HitInfo, Operation
from lam.inputs import Preprocessing, TextPreprocessing
from lam.inputs.thumbnails import thumbnail
from lam.retrieval.index.checks import unit_vectors
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.hit_scores import N_HITS
from lam.runs.finished import Run
from lam.runs.live import LiveQueries
from lam.service.answers import Answer, Query, Responder
from lam.service.errors import ServiceError
from lam.service.images import read_image
from lam.service.settings import ServiceSettings
from lam.service.workers import Worker, require_room
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

Value = TypeVar("Value")
_WARM_UPS = 3
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """An image or a text that somebody sent, as the network takes it.

    Attributes:
        tensor: the input.
        thumbnail: of an image, where one was asked for.
        text: of a text, as much of it as becomes an input.
        text_cut: whether the network reads only the beginning of the text.
    """

    tensor: Tensor
    thumbnail: bytes | None = None
    text: str | None = None
    text_cut: bool = False


class Engine:
    """A run, opened: its encoder, its gallery and its calibration, if it has one.

    Args:
        run: the run's folder.
        settings: limits.
        device: where the network runs.
        drop_corrupt, index: as `lam.gallery.gallery.Gallery` has them.
        threads: of the network, and of a search; whatever else computes then has one, this thread too. None leaves all
            as they are.

    Raises:
        CorruptFileError: naming the file that is missing, truncated or altered.
        ValueError: for a folder that is no finished run, or that another process serves; or for a device that is not
            there.
    """

    def __init__(
        self,
        run: str | Path,
        settings: ServiceSettings | None = None,
        *,
        device: str = "cpu",
        drop_corrupt: bool = False,
        index: str | None = None,
        threads: int | None = None,
    ) -> None:
        self.run = Run(run)
        self.settings = ServiceSettings() if settings is None else settings
        require_faiss()
        self.encoder = _moved(self.run.encoder, device)
        self.device = device
        self.samples = self.run.samples
        self.live: LiveQueries | None = None
        self.responder = self._responder()
        self.gallery = self.run.open_gallery(drop_corrupt=drop_corrupt, index=index)
        self._start(threads)
        self._warm_up()
        if (keep := self.settings.keep_queries) is not None:
            self.live = LiveQueries(self.run, keep)

    def _start(self, threads: int | None) -> None:
        """OpenMP counts threads by calling thread, so that each worker must set its own, as the one that calls this."""
        settings = self.settings
        one, several, searching = None, None, None
        if threads:
            one, several = _use_one_thread, partial(torch.set_num_threads, threads)
            searching = partial(_use_one_thread, but=threads)
            one()
        self.lister: Worker[Callable[[], Any], Any] = Worker("listing", _done_each, queue=settings.queue)
        self.reader: Worker[Callable[[], Any], Any] = Worker("reading", _done_each, queue=settings.queue)
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
        self.searcher: Worker[_Search, Answer] = Worker(
            "search", self._search, batch=settings.batch, queue=settings.queue, begin=searching
        )
        self.writer: Worker[Operation, Change] = Worker(
            "store", self.gallery.write, batch=8 * settings.batch, queue=settings.queue
        )

    def _warm_up(self) -> None:
        """Ask for blank inputs, so that the first request finds all loaded, and it is known how long one takes."""
        self.responder.credible_cosine(1.0)
        shape = None if self.encoder.preprocessing is None else self.encoder.preprocessing.shape
        if shape is None:
            return
        dtype = torch.uint8 if isinstance(self.encoder.preprocessing, TextPreprocessing) else torch.float32
        for _ in range(_WARM_UPS):
            with suppress(Refusal, ServiceError):
                query = self.network.submit(torch.zeros(*shape, dtype=dtype)).result(self.settings.answer_seconds)
                self.searcher.submit(_Search(query, 1)).result()

    def recalibrate(self) -> None:
        """Decide by the calibration that the run has now; one that cannot be read is logged, and the old one stays."""
        try:
            self.responder = self._responder()
        except (OSError, ValueError) as error:
            _LOG.error("the calibration in force stays: %s", error)
        else:
            _LOG.warning("the calibration was read anew")

    def _responder(self) -> Responder:
        return Responder(self.run.calibration, self.encoder.kappa_dimension, self.encoder.ambiguity)

    @property
    def takes_texts(self) -> bool:
        """Whether inputs of the run are texts."""
        return isinstance(self.encoder.preprocessing, TextPreprocessing)

    @property
    def workers(self) -> tuple[Worker[Any, Any], ...]:
        """The threads, in the order in which a request passes them."""
        return (self.lister, self.reader, self.decoder, self.network, self.searcher, self.writer)

    @property
    def complaints(self) -> list[str]:
        """Why the service is not ready; nothing where it is."""
        complaints = [*(worker.complaint for worker in self.workers), self.gallery.complaint]
        return [complaint for complaint in complaints if complaint is not None]

    def admit(self, *workers: Worker[Any, Any]) -> None:
        """Refuse a request that would wait for long, before any work is put into it.

        Args:
            workers: that it passes, in this order.

        Raises:
            Refusal: busy.
        """
        require_room(workers, self.settings.patience)

    async def list_items(self, job: Callable[[], Value]) -> Value:
        """Do what goes through many items, which nothing else waits for."""
        return await self._done(self.lister.submit(job))

    async def read(self, job: Callable[[], Value]) -> Value:
        """Do what goes through JSON or the store apart from the event loop, which it would hold up."""
        return await self._done(self.reader.submit(job))

    async def embed(self, body: Query | bytes | str, *, with_thumbnail: bool = False) -> Query:
        """Embed an image or a text that somebody sent.

        Args:
            body: a JPEG, PNG or WebP file; or a text; an embedding stays what it is.
            with_thumbnail: make one too.

        Raises:
            ServiceError: for anything else.
            Refusal: busy, where too many wait.
        """
        if isinstance(body, Query):
            return body
        decoded = await self._done(self.decoder.submit((body, with_thumbnail)))
        query = await self._done(self.network.submit(decoded.tensor))
        return replace(query, thumbnail=decoded.thumbnail, text=decoded.text, text_cut=decoded.text_cut)

    async def search(
        self,
        query: Query | Callable[[], Query],
        *,
        k: int,
        min_probability: float = 0.0,
        without: str | None = None,
    ) -> Answer:
        """Find the k nearest items, and decide.

        Args:
            query: what is looked for, or what reads it, which is done beside the search and spares waiting for another
                thread.
            k: how many hits.
            min_probability: of a match; one that is less probable is `unknown`.
            without: the id of an item that is left out of the hits, such as the query itself.

        Raises:
            Refusal: busy, where too many wait.
            ServiceError: what reading the query raises.
        """
        return await self._done(self.searcher.submit(_Search(query, k, min_probability, without)))

    async def write(self, operation: Operation) -> Change:
        """Put or delete an item; durable when this returns.

        Raises:
            Refusal: full, where it could not be stored; busy, where too many wait.
        """
        return await asyncio.shield(self._done(self.writer.submit(operation)))

    def close(self) -> None:
        """Do what waits, and let go of the folder."""
        for worker in self.workers:
            worker.close()
        if self.live is not None:
            _logging_failure(self.live.write)
        self.gallery.close()

    async def _done(self, future: "Future[Value]") -> Value:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.settings.answer_seconds)
        except TimeoutError:
            raise busy(f"there was no answer within {self.settings.answer_seconds:g} s") from None

    def _decode(self, jobs: Sequence[tuple[bytes | str, bool]]) -> list[Decoded]:
        (job,) = jobs  # of which alone is said what is raised
        return [self._decoded(*job)]

    def _decoded(self, body: bytes | str, with_thumbnail: bool) -> Decoded:
        preprocessing = self.encoder.preprocessing
        if isinstance(body, str) or isinstance(preprocessing, TextPreprocessing):
            return self._read_text(body)
        if not isinstance(preprocessing, Preprocessing):
            raise ServiceError(422, "this run does not know how an image becomes an input", allowed="embeddings")
        image = read_image(body, self.settings, least=preprocessing.reduced_to)
        try:
            return Decoded(preprocessing(image), thumbnail(image) if with_thumbnail else None)
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
            tensor = preprocessing(text)
            return Decoded(
                tensor, text=preprocessing.kept(text), text_cut=is_cut(self.encoder.network, preprocessing, text)
            )
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
                raise  # so that the worker asks for each by itself
            return [_no_embedding()]
        except RuntimeError as error:
            raise self._lost(error) from error
        embeddings, features = prediction.embeddings.to("cpu"), prediction.features.cpu()
        return [_query(embeddings[row : row + 1], features[row : row + 1]) for row in range(len(batch))]

    def _lost(self, error: RuntimeError) -> Exception:
        """What a batch is told whose device failed; where that was no CPU, the next one runs on the CPU."""
        if self.device != "cpu":
            _LOG.error("the network goes on without %s: %s", self.device, error)
            self.encoder, self.device = Run(self.run.folder).encoder, "cpu"
            return busy("the device of the network was lost; it goes on without")
        if "memory" in str(error):
            return busy("there is not enough memory for this batch")
        return error

    def _search(self, jobs: Sequence["_Search"]) -> list[Answer | Exception]:
        queries = _done_each(job.read for job in jobs)
        read = [(job, query) for job, query in zip(jobs, queries, strict=True) if isinstance(query, Query)]
        answers = iter(self._answered(*zip(*read, strict=True)) if read else ())
        return [query if isinstance(query, Exception) else next(answers) for query in queries]

    def _answered(self, jobs: Sequence["_Search"], asked: Sequence[Query]) -> list[Answer | Exception]:
        for query in asked:
            if self.live is not None and query.features is not None:
                _logging_failure(partial(self.live.add, query.embedding, query.features))
        queries = Embeddings.concatenate([_searched(query.embedding) for query in asked])
        responder = self.responder  # another may come into force meanwhile, for which there may be too few hits
        least = 0 if responder.calibration is None else N_HITS
        most = max(max(least, job.k) + (job.without is not None) for job in jobs)
        hits, infos = self.gallery.search(queries, most)
        size = len(self.gallery)
        return _done_each(
            partial(
                responder.answer,
                query,
                hits[row : row + 1] if job.without is None else _without(hits[row : row + 1], infos, job.without),
                infos,
                k=job.k,
                size=size,
                min_probability=job.min_probability,
                judged=job.without is None or not self.run.has_answers,
                is_new=job.without is None,
            )
            for row, (job, query) in enumerate(zip(jobs, asked, strict=True))
        )


def _logging_failure(keep: Callable[[], None]) -> None:
    """Keep live queries; where that fails, all else goes on."""
    try:
        keep()
    except OSError as error:
        _LOG.error("the live queries are not kept: %s", error)


@dataclass(frozen=True)
class _Search:
    """What `Engine.search` is asked."""

    query: Query | Callable[[], Query]
    k: int
    min_probability: float = 0.0
    without: str | None = None

    def read(self) -> Query:
        """The query, read where it has not been yet."""
        return self.query() if callable(self.query) else self.query


def _done_each(jobs: Iterable[Callable[[], Value]]) -> list[Value | Exception]:
    """The result of each job, or what it raised."""
    results: list[Value | Exception] = []
    for job in jobs:
        try:
            results.append(job())
        except Exception as error:
            results.append(error)
    return results


def embedding_of(mean: Tensor, kappa: float) -> Embeddings:
    """Make the embedding of one item from numbers that were checked.

    Args:
        mean: (D,) a unit vector.
        kappa: its concentration; beyond `KAPPA_RANGE` it is the end of that.
    """
    within = torch.tensor([kappa], dtype=torch.float64).clamp(*KAPPA_RANGE)
    return Embeddings(mean[None], within, torch.ones_like(within), torch.zeros_like(within))


def _query(embedding: Embeddings, features: Tensor) -> Query | Exception:
    try:
        unit_vectors(embedding, embedding.dimension)
    except ValueError:
        return _no_embedding()
    return Query(embedding, features)


def no_texts() -> ServiceError:
    """The refusal of a text by a run that takes none."""
    return ServiceError(422, "this run takes no texts", allowed="images or embeddings")


def _no_embedding() -> ServiceError:
    return ServiceError(422, "what was sent gives no finite embedding with a direction", allowed="an ordinary one")


def _searched(embedding: Embeddings) -> Embeddings:
    """What a search needs of an embedding: one that somebody sent has no more, and both come in one batch."""
    return Embeddings(embedding.mean, embedding.kappa, embedding.resultant, embedding.variance)


def _without(hits: Hits, infos: Mapping[int, HitInfo], item_id: str) -> Hits:
    """The hits of one query, but for an item."""
    kept = torch.tensor([infos[key].id != item_id for key in hits.ids[0].tolist()], dtype=torch.bool)
    return hits[:, kept]


def _moved(encoder: Encoder, device: str) -> Encoder:
    try:
        return encoder.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the network cannot be moved to device {device!r}: {error}") from None


def _use_one_thread(but: int = 1) -> None:
    """Let this thread compute alone, but for so many threads of FAISS."""
    import faiss

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(but)

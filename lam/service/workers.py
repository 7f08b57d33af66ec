"""`Worker`, a thread that collects jobs for a few milliseconds, and does them as a batch.

At each worker, a request waits for earlier jobs. `require_room` bounds the sum of these waits, which sets the latency
of the slowest answers.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from lam.gallery.refusal import Refusal, busy

Job = TypeVar("Job")
Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)
_RECENT = 8  # number of batches over which the time of a job is averaged
_PAUSE = 0.2  # seconds before a thread starts over after an error
_STUCK = 20.0
_BATCH_SECONDS = 0.25  # longer batches are no faster, and the next request waits for the whole batch


class Worker(Generic[Job, Result]):
    """A thread that does jobs in batches; after an unexpected error, it refuses the batch and starts over.

    Args:
        work: returns a result or an exception for each job of a batch.
        queue: greatest number of waiting jobs.
        batch: greatest number of jobs in a batch.
        wait: seconds for which a batch waits for more jobs.
        begin: called whenever the thread starts or starts over, for settings of the thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], Sequence[Result | Exception]],
        *,
        queue: int,
        batch: int = 1,
        wait: float = 0.0,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._work, self._begin = work, begin
        self._batch, self._wait, self._queue = batch, wait, queue
        self._jobs: deque[tuple[Job, Future[Result]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.seconds_a_job = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._busy_since: float | None = None
        self._in_hand: list[tuple[Job, Future[Result]]] = []
        self._running = False
        self._thread = threading.Thread(target=self._supervise, name=f"lam {name}", daemon=True)
        self._thread.start()
        with self._changed:  # `complaint` would report a thread that has not begun as dead
            self._changed.wait_for(lambda: self._running or self.restarts, _PAUSE)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def complaint(self) -> str | None:
        """Why the worker is not ready, or None."""
        since = self._busy_since
        if not self._thread.is_alive() or not self._running:
            return f"the {self.name} worker is being restarted"
        if since is not None and time.monotonic() - since > _STUCK:
            return f"the {self.name} worker has been at one batch for {time.monotonic() - since:.0f} s"
        return None

    @property
    def jobs(self) -> int:
        """Number of waiting and running jobs."""
        return len(self._jobs) + len(self._in_hand)

    def submit(self, job: Job) -> "Future[Result]":
        """Put a job into the queue; refused as `busy` if the queue is full."""
        return self.submit_all([job])[0]

    def submit_all(self, jobs: Sequence[Job]) -> "list[Future[Result]]":
        """Put jobs into the queue together, to share batches; if some do not fit, all are refused as `busy`."""
        entries: list[tuple[Job, Future[Result]]] = [(job, Future()) for job in jobs]
        with self._changed:
            if self._closing:
                raise busy("the service is shutting down", after=5)
            if len(self._jobs) + len(jobs) > self._queue:
                raise busy(f"{len(self._jobs)} requests wait for the {self.name} worker, the most that may")
            self._jobs.extend(entries)
            self._changed.notify()
        return [future for _, future in entries]

    def close(self, *, timeout: float = 10.0) -> None:
        """Refuse new jobs, do the waiting ones, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _supervise(self) -> None:
        while True:
            try:
                if self._begin is not None:
                    self._begin()
                with self._changed:
                    self._running = True
                    self._changed.notify_all()
                self._loop()
                return
            except BaseException:
                self._running = False
                _LOG.exception("the %s worker died and is restarted", self.name)
                for _, future in self._in_hand:
                    if not future.done():
                        future.set_exception(busy(f"the {self.name} worker died during this request"))
                self._in_hand, self._busy_since = [], None
                self.restarts += 1
                time.sleep(_PAUSE)

    def _loop(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._in_hand = [entry for entry in batch if entry[1].set_running_or_notify_cancel()]
            if self._in_hand:
                self._do()

    def _next_batch(self) -> list[tuple[Job, "Future[Result]"]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if not self._jobs:
                return None
            until = time.monotonic() + self._wait
            most = self._batch
            if self.seconds_a_job:
                most = max(1, min(most, int(_BATCH_SECONDS / self.seconds_a_job)))
            while len(self._jobs) < most and not self._closing:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return [self._jobs.popleft() for _ in range(min(most, len(self._jobs)))]

    def _do(self) -> None:
        started = self._busy_since = time.monotonic()
        results = self._results([job for job, _ in self._in_hand])
        self._recent.append((time.monotonic() - started) / len(self._in_hand))
        recent = sorted(self._recent)[:-1]  # without the longest, so that one slow batch causes no refusals
        self.seconds_a_job = sum(recent) / max(1, len(recent))
        for (_, future), result in zip(self._in_hand, results, strict=True):
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        self._in_hand, self._busy_since = [], None

    def _results(self, jobs: list[Job]) -> Sequence[Any]:
        """The results of a batch. If the batch fails, each job is done alone, so one bad job fails no other jobs."""
        try:
            return self._work(jobs)
        except Refusal as error:
            return [error] * len(jobs)
        except (ValueError, RuntimeError) as error:
            if len(jobs) == 1:
                return [error]
            return [result for job in jobs for result in self._results([job])]


def results_of(jobs: Iterable[Callable[[], Result]]) -> list[Result | Exception]:
    """The result of each job, or its exception."""
    results: list[Result | Exception] = []
    for job in jobs:
        try:
            results.append(job())
        except Exception as error:
            results.append(error)
    return results


def require_room(workers: Sequence[Worker[Any, Any]], patience: float) -> None:
    """Refuse a request as `busy` if jobs wait and the work before the request takes more than `patience` seconds.

    The request visits `workers` in order. Jobs before the request at one worker are before it at later workers, too.
    """
    before, seconds = 0, 0.0
    for worker in workers:
        before += worker.jobs
        seconds += before * worker.seconds_a_job
    if seconds > patience and any(map(len, workers)):
        raise busy(f"{before} requests with {seconds:.1f} s of work are before this one, at most {patience:g} s may be")

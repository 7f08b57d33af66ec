"""Workers: batches, isolation, a bounded queue, and a new thread after one has died."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lam.gallery.refusal import Refusal
from lam.service.workers import Worker, require_room

Make = Callable[..., Worker[Any, Any]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Worker[Any, Any]] = []

    def build(work: Callable[[Sequence[Any]], Sequence[Any]], **options: Any) -> Worker[Any, Any]:
        options = {"batch": 8, "wait": 0.05, "queue": 100, **options}
        made.append(Worker("test", work, **options))
        return made[-1]

    yield build
    for worker in made:
        worker.close(timeout=5.0)


def test_what_comes_together_is_one_batch(make: Make) -> None:
    sizes: list[int] = []

    def work(jobs: Sequence[int]) -> list[int]:
        sizes.append(len(jobs))
        return [job * 2 for job in jobs]

    worker = make(work, batch=4)
    futures = [worker.submit(number) for number in range(8)]
    assert [future.result(5) for future in futures] == [number * 2 for number in range(8)]
    assert sizes == [4, 4]


def test_one_bad_job_does_not_spoil_the_others(make: Make) -> None:
    def work(jobs: Sequence[int]) -> list[float]:
        if 0 in jobs:
            raise ValueError("no zero")
        return [1 / job for job in jobs]

    worker = make(work)
    futures = [worker.submit(number) for number in (1, 0, 2)]
    assert futures[0].result(5) == 1
    assert futures[2].result(5) == 0.5
    with pytest.raises(ValueError, match="no zero"):
        futures[1].result(5)


def test_a_full_queue_refuses_at_once(make: Make) -> None:
    release = threading.Event()

    def work(jobs: Sequence[int]) -> Sequence[int]:
        release.wait(5)
        return jobs

    worker = make(work, batch=1, wait=0.0, queue=2)
    first = worker.submit(0)
    while len(worker):
        time.sleep(0.001)
    futures = [first, worker.submit(1), worker.submit(2)]
    with pytest.raises(Refusal, match="2 requests wait") as refused:
        worker.submit(3)
    assert refused.value.status == 503
    assert refused.value.headers == {"Retry-After": "1"}
    release.set()
    assert [future.result(5) for future in futures] == [0, 1, 2]


def test_the_work_before_a_request_is_bounded_at_all_workers_together(make: Make) -> None:
    held = threading.Event()
    held.set()

    def work(jobs: Sequence[int]) -> Sequence[int]:
        time.sleep(0.1)
        held.wait(5)
        return jobs

    first, second = make(work, batch=1, wait=0.0), make(work, batch=1, wait=0.0)
    for worker in (first, second):
        for _ in range(2):
            worker.submit(0).result(5)
    require_room([first, second], 0.0)
    held.clear()
    waiting = [first.submit(number) for number in range(2)]
    require_room([second], 0.0)
    require_room([first], 0.25)  # two jobs of a tenth of a second
    require_room([first, second], 0.45)  # they then wait for the second worker, too
    with pytest.raises(Refusal, match="2 requests.*0.4 s of") as refused:
        require_room([first, second], 0.35)
    assert refused.value.status == 503
    held.set()
    assert [future.result(5) for future in waiting] == [0, 1]


def test_a_request_is_taken_where_none_waits_however_long_one_takes(make: Make) -> None:
    release, begun = threading.Event(), threading.Event()

    def work(jobs: Sequence[int]) -> Sequence[int]:
        begun.set()
        release.wait(5)
        return jobs

    worker = make(work, batch=1, wait=0.0)
    worker.seconds_a_job = 100.0
    first = worker.submit(0)
    assert begun.wait(5)
    require_room([worker], 1.0)
    second = worker.submit(1)
    with pytest.raises(Refusal, match="2 requests.*200.0 s of"):
        require_room([worker], 1.0)
    release.set()
    assert [first.result(5), second.result(5)] == [0, 1]


@pytest.mark.parametrize("seconds", [[0.3], [0.01] * 5 + [0.3], [0.3] * 2, [0.01] * 5 + [0.3] * 4])
def test_one_slow_job_refuses_nobody_behind_it_and_several_do(make: Make, seconds: list[float]) -> None:
    """A slow job may be the first one after the start, or may wait for the processor while another run is opened."""
    held = threading.Event()
    left = iter(seconds)

    def work(jobs: Sequence[int]) -> Sequence[int]:
        time.sleep(next(left, 0.0))
        held.wait(5 if next(iter(jobs)) else 0)
        return jobs

    worker = make(work, batch=1, wait=0.0)
    for _ in seconds:
        worker.submit(0).result(5)
    waiting = [worker.submit(number) for number in (1, 2, 3)]
    if seconds.count(0.3) == 1:
        require_room([worker], 0.1)
    else:
        with pytest.raises(Refusal, match="3 requests with"):
            require_room([worker], 0.1)
    held.set()
    assert [future.result(5) for future in waiting] == [1, 2, 3]


def test_a_worker_that_has_not_begun_is_not_told_as_one_that_died(make: Make) -> None:
    assert make(lambda jobs: jobs, begin=lambda: time.sleep(0.05)).complaint is None


def dies_and_comes_back(make: Make, times: int) -> None:
    def work(jobs: Sequence[str]) -> Sequence[str]:
        if "die" in jobs:
            raise MemoryError("out of it")
        return jobs

    worker = make(work, wait=0.0)
    for number in range(times):
        with pytest.raises(Refusal, match="died"):
            worker.submit("die").result(5)
        assert "test worker" in worker.complaint
        assert worker.submit("live").result(5) == "live"
        assert worker.complaint is None
        assert worker.restarts == number + 1


def test_a_worker_that_dies_is_replaced(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    dies_and_comes_back(make, 3)
    assert "is restarted" in caplog.text


@pytest.mark.slow
def test_a_worker_that_dies_20_times_is_replaced_20_times(make: Make) -> None:
    dies_and_comes_back(make, 20)


def test_a_cancelled_job_is_not_done(make: Make) -> None:
    done: list[int] = []

    def work(jobs: Sequence[int]) -> Sequence[int]:
        done.extend(jobs)
        return jobs

    worker = make(work, wait=0.2)
    gone, stays = worker.submit(1), worker.submit(2)
    assert gone.cancel()
    assert stays.result(5) == 2
    assert done == [2]


def test_closing_does_what_waits_and_takes_no_more(make: Make) -> None:
    worker = make(lambda jobs: jobs, wait=0.5, batch=3)
    futures = [worker.submit(number) for number in range(2)]
    worker.close(timeout=5.0)
    assert [future.result(0) for future in futures] == [0, 1]
    with pytest.raises(Refusal, match="shutting down"):
        worker.submit(2)

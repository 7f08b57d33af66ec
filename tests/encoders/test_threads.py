"""An encoder gives the same results in many threads as in one."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lam
from lam.encoders.ensemble import DropoutEncoder
from lam.retrieval.index.faiss_index import Index

N_THREADS = 16
HELD_OUT = "ignore:.*(held-out data|likelihood scale).*:UserWarning"

Wrap = Callable[[nn.Module], nn.Module]


def eager(network: nn.Module) -> nn.Module:
    return network


def compiled(network: nn.Module) -> Any:
    return torch.compile(network, backend="eager")


def in_training_mode(network: nn.Module) -> nn.Module:
    return network.train()


def make_data(n_items: int) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 6))
    labels = torch.arange(n_items) % 5
    return network.eval(), torch.randn(n_items, 32, generator=generator) + labels[:, None], labels


def one_by_one(encoder: lam.Encoder, inputs: Tensor) -> Tensor:
    """log κ and direction of items that are embedded alone."""
    parts = [encoder.embed(row[None]) for row in inputs]
    return torch.cat([torch.cat([part.kappa.log()[:, None], part.mean], 1) for part in parts])


def greatest_gap(encoder: lam.Encoder, inputs: Tensor, each: int, *others: Callable[[], object]) -> float:
    """The greatest difference between 16 threads, which run beside `others`, and one thread."""
    expected = one_by_one(encoder, inputs)
    start = threading.Barrier(N_THREADS + len(others))

    def embed(number: int) -> float:
        start.wait()
        rows = (torch.arange(each) + number * 37) % len(inputs)
        return float((one_by_one(encoder, inputs[rows]) - expected[rows]).abs().max())

    def beside(work: Callable[[], object]) -> float:
        start.wait()
        work()
        return 0.0

    with ThreadPoolExecutor(N_THREADS + len(others)) as pool:
        calls = [pool.submit(embed, number) for number in range(N_THREADS)]
        calls += [pool.submit(beside, work) for work in others]
        return max(call.result() for call in calls)


def check_embed_tune_and_search(wrap: Wrap, n_items: int, each: int) -> float:
    """The greatest difference in log κ or a direction between several threads and one."""
    network, inputs, labels = make_data(n_items)
    encoder: Any = lam.fit(wrap(network), [(inputs[:100], labels[:100])], margin=0.7, progress=False)
    index = Index(encoder.dimension)
    index.add(encoder.embed(inputs), range(n_items))

    def hits() -> Tensor:
        return torch.as_tensor(index.search(encoder.embed(inputs[:20]), k=3).ids)

    def tuned() -> float:
        other = copy(encoder)
        other.tune([(inputs[:60], labels[:60])], refinements=0, n_samples=4, greatest=100.0)
        return other.posterior.likelihood_scale

    def checked(work: Callable[[], Any]) -> Callable[[], object]:
        expected = work()
        return lambda: torch.testing.assert_close(work(), expected)

    gap = greatest_gap(encoder, inputs, each, checked(tuned), *[checked(hits)] * 3)
    assert gap <= 1e-5
    return gap


@pytest.mark.filterwarnings(HELD_OUT)
@pytest.mark.parametrize("wrap", [eager, compiled, in_training_mode])
def test_sixteen_threads_that_embed_tune_and_search_get_what_one_gets(wrap: Wrap) -> None:
    check_embed_tune_and_search(wrap, 100, 5)


@pytest.mark.slow
@pytest.mark.usefixtures("as_in_production")
@pytest.mark.filterwarnings(HELD_OUT)
@pytest.mark.parametrize("wrap", [eager, compiled, in_training_mode])
def test_sixteen_threads_of_ten_thousand_embeddings_get_what_one_gets(
    wrap: Wrap, record_property: Callable[[str, object], None]
) -> None:
    gap = check_embed_tune_and_search(wrap, 600, 10_000)
    record_property(wrap.__name__, json.dumps({"greatest_difference": gap}))


def test_thinned_networks_are_one_threads_own() -> None:
    network, inputs, _ = make_data(40)
    assert greatest_gap(DropoutEncoder(network, "4", seed=0, n_samples=4), inputs, 2) <= 1e-5


def test_calls_of_the_network_itself_are_not_taken_for_those_of_the_encoder() -> None:
    network, inputs, labels = make_data(100)
    encoder = lam.fit(network, [(inputs, labels)], margin=0.7, progress=False)
    assert greatest_gap(encoder, inputs, 5, *[lambda: [network(inputs) for _ in range(100)]] * 3) <= 1e-5


def test_a_process_forked_beside_a_thread_embeds() -> None:
    inside, go_on, forked = threading.Event(), threading.Event(), get_context("fork")
    network, inputs, labels = make_data(40)
    encoder = lam.fit(network, [(inputs, labels)], margin=0.7, progress=False)
    expected, answers = encoder.embed(inputs).kappa.tolist(), forked.SimpleQueue()

    def wait(*_: object) -> None:
        inside.set()
        go_on.wait(10)

    def embed() -> None:
        answers.put(encoder.embed(inputs).kappa.tolist())

    with network[0].register_forward_hook(wait), ThreadPoolExecutor(1) as pool:
        call = pool.submit(encoder.embed, inputs)
        inside.wait()
        threading.Timer(0.2, go_on.set).start()
        child = forked.Process(target=embed)
        child.start()
        child.join(10)
        child.kill()
        assert call.result().kappa.tolist() == expected
    assert not answers.empty()
    assert answers.get() == expected

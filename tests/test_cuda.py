"""A GPU gives the same results as the CPU: curvatures, training by every method, a whole run, experiments.

Without a GPU, these tests are skipped; all other tests run on the CPU, or on the device that "auto" chooses.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import lam
from lam.experiments import EXPERIMENTS, conduct
from lam.experiments.base import SECONDS
from lam.hessians import ContrastiveCurvature, SupConCurvature
from lam.methods import METHODS
from lam.posteriors import POSTERIORS
from lam.retrieval.index.faiss_index import Index
from lam.runs.config_files import load_config
from lam.runs.run import run
from lam.utils.random import on_device
from lam.vmf import VonMisesFisher
from lam.vmf.embeddings import Embeddings
from tests.conftest import TINY
from tests.encoders.small import make_batches, make_network
from tests.experiments.test_experiments import SHORT
from tests.helpers import contrastive_ggn_dataset
from tests.methods import small_data as small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS: list[dict[str, Any]] = [
    *({"structure": structure} for structure in POSTERIORS),
    {"pairs": "dataset"},
    {"pairs": "dataset", "structure": "kron"},
    {"curvature": ContrastiveCurvature(0.7, split="euclidean", fix="positive")},
    {"curvature": ContrastiveCurvature(0.7, fix="full")},
    {"curvature": ContrastiveCurvature(0.7, fix="projected")},
    {"curvature": SupConCurvature(0.1)},
    {"curvature": SupConCurvature(0.1, fix="full")},
    {"layers": "all"},
    {"layers": "all", "structure": "kron"},
    {"layers": "all", "predictive": "sampled"},
]


def doubled() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(inputs.double(), labels) for inputs, labels in make_batches()]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_fit_is_that_of_the_cpu(settings: dict[str, Any], tmp_path: Path) -> None:
    batches = doubled()
    options = lam.Laplace(**{"margin": 0.7, "prior_precision": 10.0, **settings})
    on_cpu = lam.fit(make_network().double(), batches, options, progress=False)
    on_gpu = lam.fit(make_network().double().cuda(), batches, options, progress=False)
    expected = on_cpu.posterior.curvature.tensors()
    for name, sums in on_gpu.posterior.curvature.tensors().items():
        assert sums.device.type == "cuda"
        if not name.endswith(("_basis", "sketch")):
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(sums.cpu(), expected[name], rtol=1e-7, atol=1e-9 * scale)
    embeddings, own = on_cpu.embed(batches), on_gpu.embed(batches)
    assert own.kappa.device.type == "cuda"
    torch.testing.assert_close(own.mean.cpu(), embeddings.mean)
    assert lam.evaluate(on_gpu, batches, [batches[0][0]], n_samples=4).metrics["recall@1"] > 0.5
    on_gpu.tune(batches, n_samples=4, greatest=1e3)
    on_gpu.save(tmp_path)
    torch.testing.assert_close(lam.load(tmp_path, make_network().double()).embed(batches).mean, embeddings.mean)


@pytest.mark.filterwarnings("ignore:κ is 1e-06")  # of so few images
@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_there(name: str, tmp_path: Path) -> None:
    data = small.images()
    encoder = small.quick(name).train(small.network(dropout=0.1), data, small.training(accelerator="cuda")).encoder
    embeddings = encoder.embed(data.images)
    assert embeddings.kappa.isfinite().all()
    outside = [small.outside()]
    assert lam.evaluate(encoder, small.batches(data), outside, n_samples=4).metrics["recall@1"] > 0.2
    encoder.save(tmp_path)
    torch.testing.assert_close(lam.load(tmp_path).embed(data.images).mean, embeddings.mean.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("method", ["laplace_posthoc", "laplace_online", "mcinfonce"])
def test_a_run_is_made_and_evaluated_there(method: str, precision: str, tmp_path: Path) -> None:
    words = [*TINY, f"--output={tmp_path / 'run'}", "--accelerator=cuda", f"--training.precision={precision}"]
    result = run(load_config(f"digits {method}", words), progress=False)
    assert result.metrics["recall@1"] > 0.1
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs_there_and_the_seed_repeats_it(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name](**SHORT[name], accelerator="cuda")
    outcome, again = (conduct(experiment, tmp_path / folder) for folder in "ab")
    for row, other in zip(outcome.rows, again.rows, strict=True):
        for column in set(row) - {SECONDS}:
            is_number = isinstance(other[column], float)
            assert row[column] == (pytest.approx(other[column], rel=1e-3) if is_number else other[column])


def test_samples_and_densities_are_those_of_the_distribution() -> None:
    loc = torch.nn.functional.normalize(torch.randn(5, 4, dtype=torch.float64), dim=1)
    kappa = torch.tensor([0.1, 1.0, 10.0, 100.0, 1e4], dtype=torch.float64, requires_grad=True)
    there = VonMisesFisher(loc.cuda(), kappa.cuda())
    torch.testing.assert_close(there.log_prob(loc.cuda()).cpu(), VonMisesFisher(loc, kappa).log_prob(loc))
    samples = there.rsample((20_000,), generator=torch.Generator("cuda").manual_seed(0))
    torch.testing.assert_close(samples.mean(0).cpu(), VonMisesFisher(loc, kappa).mean, rtol=0, atol=0.03)
    samples.sum().backward()
    assert kappa.grad is not None
    assert kappa.grad.isfinite().all()


def test_noise_there_follows_from_the_seed_of_a_generator_here() -> None:
    here = torch.Generator().manual_seed(7)
    assert on_device(here, torch.device("cpu")) is here
    one, two = (torch.randn(3, generator=on_device(here, torch.device("cuda")), device="cuda") for _ in range(2))
    assert torch.equal(one, two)


def test_float32_sums_over_a_data_set_are_as_exact_as_the_similarities() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 7, (3000,), generator=generator)
    features = torch.randn(7, 20, generator=generator)[labels] + torch.randn(3000, 20, generator=generator)
    weight, options = torch.randn(5, 20, generator=generator), {"margin": 2.0, "progress": False}
    expected = contrastive_ggn_dataset(features.double(), weight.double(), None, related=labels, **options)
    for size in (700, None):
        got = contrastive_ggn_dataset(
            features.cuda(), weight.cuda(), None, related=labels.cuda(), block_size=size, **options
        )
        scale = float(expected.sums.abs().max())
        torch.testing.assert_close(got.sums.cpu(), expected.sums, rtol=1e-5, atol=1e-6 * scale)


def test_an_index_there_finds_what_one_here_finds() -> None:
    faiss = pytest.importorskip("faiss")
    if not hasattr(faiss, "StandardGpuResources"):
        pytest.skip("needs a FAISS built for GPUs")
    means = torch.nn.functional.normalize(torch.randn(2000, 16), dim=1)
    embeddings = Embeddings(means, *torch.ones(3, 2000))
    for factory in ("Flat", "IVF8,Flat"):
        here, there = (Index(16, factory, device=device) for device in ("cpu", "cuda"))
        for index in (here, there):
            if "IVF" in factory:
                index.train(embeddings)
            index.add(embeddings, range(2000))
        expected, got = (index.search(embeddings[:50], 1) for index in (here, there))
        assert torch.equal(torch.as_tensor(got.ids), torch.as_tensor(expected.ids))

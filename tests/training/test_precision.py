"""Networks of half precision: they train and are fitted, and the curvature and the posterior are float32 or wider."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lam
from lam.datasets import TensorImages
from lam.encoders.bayesian import BayesianEncoder
from lam.hessians import ContrastiveCurvature
from lam.methods import METHODS, LaplaceOnline, LaplacePosthoc
from tests.methods.small_data import batches, images, network, outside, quick, training

HALF = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative rounding error of each type."""


def tensors_of(encoder: BayesianEncoder) -> dict[str, Any]:
    posterior, embeddings = encoder.posterior, encoder.embed(outside())
    return {
        "weight": posterior.weight,
        "sample": posterior.sample(1)[0],
        "mean": embeddings.mean,
        "kappa": embeddings.kappa,
    }


@pytest.mark.parametrize("method", [LaplacePosthoc, LaplaceOnline])
def test_training_in_mixed_precision_gives_float32_posteriors(method: Any) -> None:
    trained = network()
    start = trained.head.weight.detach().clone()
    encoder = method().train(trained, images(), training(precision="bf16-mixed")).encoder
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}
    assert not torch.equal(trained.head.weight, start)
    curvature = encoder.posterior.curvature
    assert curvature.sums.dtype in (torch.float32, torch.float64)
    for name, tensor in tensors_of(encoder).items():
        assert tensor.dtype == torch.float32, name
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_a_network_of_another_type(name: str, dtype: torch.dtype) -> None:
    data = TensorImages(images().images.to(dtype), images().labels)
    trained = quick(name).train(network(dropout=0.2).to(dtype), data, training())
    assert trained.encoder.network is not None
    assert {parameter.dtype for parameter in trained.encoder.network.parameters()} == {dtype}
    embeddings = trained.encoder.embed(outside().to(dtype))
    assert embeddings.mean.isfinite().all()
    assert embeddings.kappa.isfinite().all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("pairs", ["batch", "dataset"])
def test_a_network_of_half_precision_is_fitted_in_float32(dtype: torch.dtype, pairs: Any) -> None:
    def fitted(wanted: torch.dtype) -> BayesianEncoder:
        data: list[tuple[Tensor, Tensor]] = [(inputs.to(wanted), labels) for inputs, labels in batches(images())]
        curvature = ContrastiveCurvature(0.7, "euclidean", "positive")
        return lam.fit(network().to(wanted), data, lam.Laplace(curvature=curvature, pairs=pairs), progress=False)

    half, full = fitted(dtype), fitted(torch.float32)
    curvature, expected = half.posterior.curvature, full.posterior.curvature
    assert curvature.h.dtype == torch.float64
    torch.testing.assert_close(curvature.h, expected.h, rtol=0, atol=20 * UNIT[dtype] * float(expected.h.max()))
    assert half.posterior.weight.dtype == half.posterior.variance.dtype == torch.float32
    embeddings = half.embed(outside().to(dtype))
    assert embeddings.mean.dtype == embeddings.kappa.dtype == torch.float32

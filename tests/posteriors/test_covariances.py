"""Every posterior against the dense Gaussian that it stands for: precision, inverse and determinant as matrices."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lam.hessians import ContrastiveCurvature, Full, SupConCurvature, ggn_of_batch
from lam.pairs import Pairs
from lam.posteriors import POSTERIORS, FullPosterior, Posterior
from lam.posteriors.spread import AxisSpread, FullSpread
from lam.vmf.embeddings import mean_resultant_length
from tests.posteriors.test_laws import D, N, P, draw, make

DTYPE = torch.float64


def clipped(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ values.clamp(min=0).diag() @ vectors.T


def dense_h(posterior: Any) -> Tensor:
    """h as a (D F, D F) matrix, with negative values set to zero."""
    h = posterior.curvature
    if posterior.structure.name == "diag":
        return h.h.relu().flatten().diag()
    if posterior.structure.name == "kron":
        return torch.kron(clipped(h.h), h.inputs / h.n_items)
    if posterior.structure.name == "ekfac":
        rotation = torch.kron(h.output_basis, h.input_basis)
        return rotation @ h.h.relu().flatten().diag() @ rotation.T
    if posterior.structure.name == "full":
        return clipped(h.h)
    return torch.kron(clipped(h.h), h.factor @ h.factor.T + h.rest.diag())


def dense_covariance(posterior: Any) -> Tensor:
    identity = torch.eye(posterior.theta.numel(), dtype=DTYPE)
    return torch.linalg.inv(posterior.scale * dense_h(posterior) + posterior.prior_precision * identity)


def jacobian(posterior: Posterior, features: Tensor) -> Tensor:
    """Jacobians (N, D, D F) of outputs with respect to weights."""
    inputs = posterior._inputs(features)
    return torch.einsum("de,nf->ndef", torch.eye(D, dtype=DTYPE), inputs).flatten(2)


@pytest.fixture(params=POSTERIORS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e8])
def test_the_covariance_of_outputs_is_that_of_the_dense_gaussian(name: str, bias: bool, scale: float):
    posterior, features = make(name, bias=bias)
    posterior = replace(posterior, likelihood_scale=scale)
    J = jacobian(posterior, features)
    expected = J @ dense_covariance(posterior) @ J.mT
    spread = posterior.output_spread()(features)
    torch.testing.assert_close(spread.covariance, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(spread.variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(spread.total, expected.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(posterior.predict(features).variance, spread.total)


@pytest.mark.parametrize("bias", [True, False])
def test_the_variance_of_a_cosine_is_that_of_its_gradient_in_the_dense_gaussian(name: str, bias: bool):
    posterior, features = make(name, bias=bias)
    queries, hits = features[:8], features[8:16]
    theta, inputs = posterior.theta.clone().requires_grad_(), [posterior._inputs(part) for part in (queries, hits)]
    expected = F.cosine_similarity(*(part @ theta.T for part in inputs))
    gradients = torch.stack([torch.autograd.grad(c, theta, retain_graph=True)[0].flatten() for c in expected])
    variances = torch.einsum("nk,kl,nl->n", gradients, dense_covariance(posterior), gradients)
    found = posterior.cosine_variance(queries, hits)
    torch.testing.assert_close(found, (expected.detach(), variances), rtol=1e-7, atol=1e-12)
    assert (posterior.cosine_variance(queries, queries)[1] < 1e-12 * variances.max()).all()
    with pytest.raises(ValueError, match="query.*features.*hit"):
        posterior.cosine_variance(queries, hits[:3])


def test_the_variance_of_the_cosine_of_a_zero_output_is_large_and_finite(name: str):
    posterior, features = make(name, bias=False)
    posterior, zero = replace(posterior, weight=posterior.weight * (torch.arange(P) > 0)), torch.eye(1, P, dtype=DTYPE)
    for pair in ((zero, features[:1]), (features[:1], zero)):
        cosine, variance = posterior.cosine_variance(*pair)
        assert cosine == 0
        assert 1e100 < variance < math.inf


@pytest.mark.parametrize("name", ["kron", "ekfac", "low_rank"])
def test_samples_do_not_depend_on_the_signs_of_eigenvectors(name: str):
    posterior, features = make(name)
    sums = replace(posterior.curvature)  # without cached values
    if name == "low_rank":
        values, axes = sums.output_eigen
        vars(sums)["output_eigen"] = values, axes * torch.tensor([1.0, -1.0, 1.0])
    elif name == "kron":
        (b, U_B), (a, U_A) = sums._outputs, sums.input_eigen
        vars(sums).update(_outputs=(b, -U_B), input_eigen=(a, U_A * (-1.0) ** torch.arange(P + 1)))
    else:
        sums = replace(sums, output_basis=-sums.output_basis)
    other = replace(posterior, curvature=sums)
    for one, another in zip(posterior.sample(4), other.sample(4), strict=True):
        torch.testing.assert_close(one, another)
    torch.testing.assert_close(other.predict(features).kappa, posterior.predict(features).kappa)


def test_sampled_layers_have_the_covariance_of_the_dense_gaussian(name: str):
    posterior, _ = make(name)
    expected = dense_covariance(posterior)
    weights, biases = posterior.sample(60_000)
    assert biases is not None
    theta = torch.cat([weights, biases[..., None]], 2).flatten(1)
    largest = float(expected.diagonal().max())
    torch.testing.assert_close(torch.cov(theta.T), expected, rtol=0.05, atol=0.02 * largest)
    torch.testing.assert_close(theta.mean(0), posterior.theta.flatten(), rtol=0, atol=0.03 * math.sqrt(largest))


def test_the_evidence_is_that_of_the_dense_gaussian(name: str):
    posterior, _ = make(name)
    theta, alpha = posterior.theta.flatten(), 0.7
    identity = torch.eye(len(theta), dtype=DTYPE)
    precision = posterior.scale * dense_h(posterior) + alpha * identity
    assert posterior.log_det_precision(alpha) == pytest.approx(float(torch.logdet(precision)), rel=1e-9)
    prior = torch.distributions.Normal(torch.zeros((), dtype=DTYPE), alpha**-0.5)
    expected = prior.log_prob(theta).sum() + 0.5 * (len(theta) * math.log(2 * torch.pi) - torch.logdet(precision))
    assert posterior.log_marginal_likelihood(alpha) == pytest.approx(float(expected), rel=1e-9)
    for prior_precision in (1e-3, 1e3):
        step = replace(posterior, prior_precision=prior_precision).with_prior_step(0.1).prior_precision
        assert step == pytest.approx(prior_precision * math.exp(math.copysign(0.1, 1 - prior_precision)))


def test_marginal_draws_have_the_whole_covariance_of_an_output(name: str):
    posterior, features = make(name)
    covariance, outputs, n_samples = (
        posterior.output_spread()(features[:4]).covariance,
        posterior.outputs(features[:4]),
        60_000,
    )
    noise = torch.randn(n_samples, D, generator=torch.Generator().manual_seed(0), dtype=DTYPE)
    samples = outputs + torch.einsum("nij,sj->sni", torch.linalg.cholesky(covariance), noise)
    expected = mean_resultant_length(F.normalize(samples, dim=-1), unbiased=True)
    many: dict[str, Any] = {"n_samples": n_samples}
    marginal, network = (posterior.predict(features[:4], mode=mode, **many) for mode in ("marginal", "network"))
    torch.testing.assert_close(marginal.kappa, network.kappa, rtol=0.03, atol=0)
    torch.testing.assert_close(marginal.kappa, expected.kappa(), rtol=0.03, atol=0)
    directions = posterior.predict(features[:4], mean="sampled", **many).mean
    torch.testing.assert_close(directions, expected.mean, rtol=0, atol=0.01)


@pytest.mark.parametrize("bias", [True, False])
def test_the_share_of_clipped_variance_is_what_the_prior_alone_holds(name: str, bias: bool):
    posterior, features = make(name, bias=bias)
    share = posterior.clipped_variance_share(features)
    assert 0 <= share <= 1
    sure = replace(posterior, likelihood_scale=1e14)
    total = sure.output_spread()(features).total.sum()
    if posterior.curvature.clipped:
        assert share > 0
        kept = (sure.clipped_variance_share(features) * total).item()
        assert kept == pytest.approx((share * posterior.output_spread()(features).total.sum()).item(), rel=1e-6)
    else:
        assert share == 0
    without = ContrastiveCurvature(1.0, "euclidean", negative_weight=0.0)
    positive = replace(posterior, curvature=replace(posterior.curvature, curvature=without))
    assert positive.clipped_variance_share(features) < 1


@pytest.mark.parametrize("curvature", [ContrastiveCurvature(1.0, "euclidean"), SupConCurvature(0.3)], ids=str)
def test_a_full_posterior_keeps_the_priors_variance_along_the_weights_which_only_lengthen_outputs(curvature: Any):
    features, weight, bias = draw(N, P, seed=0), draw(D, P, seed=7), draw(D, seed=8)
    empty = Full.zeros(weight, curvature, has_bias=True)
    full = ggn_of_batch(empty, features, weight, bias, Pairs.by_label(torch.arange(N) % 3))
    posterior = FullPosterior(weight, bias, full, N, prior_precision=2.0, likelihood_scale=1e6)
    direction = F.normalize(posterior.theta.flatten(), dim=0)
    assert float((full.h @ direction).norm()) < 1e-12 * float(full.h.norm())
    torch.testing.assert_close(dense_covariance(posterior) @ direction, direction / 2.0)


def test_a_spread_has_at_least_the_least_variance():
    zero, least = torch.zeros(2, D, dtype=DTYPE), torch.tensor([[4.0], [9.0]], dtype=DTYPE)
    noise = draw(5, 1, D, seed=0)
    expected = mean_resultant_length(F.normalize(zero + 1 + noise * least.sqrt(), dim=-1), unbiased=True)
    for spread in (AxisSpread(zero), AxisSpread(zero, torch.eye(D, dtype=DTYPE))):
        torch.testing.assert_close(spread.samples(zero + 1, noise, least).resultant, expected.resultant)
    torch.testing.assert_close(FullSpread(torch.diag_embed(zero)).samples(zero, noise, least), noise * least.sqrt())
    assert AxisSpread(zero + 2).covariance[0].tolist() == (2 * torch.eye(D)).tolist()

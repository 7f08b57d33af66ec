"""A loss from outside lam has all features of the contrastive loss: fit, save, load, add, forget."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lam
from lam.hessians import CURVATURES, ContrastiveCurvature, Curvature, diagonal_ggn, register
from lam.pairs import Pairs, Relation
from tests.encoders.small import make_batches, make_network, same_posterior
from tests.hessians import softmax
from tests.hessians.softmax import SoftmaxCurvature

SOFTMAX = SoftmaxCurvature(temperature=0.3)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register("softmax", SoftmaxCurvature)
    yield
    CURVATURES.pop("softmax", None)


def fit(batches: Any, **options: Any) -> lam.BayesianEncoder:
    return lam.fit(make_network(), batches, lam.Laplace(curvature=SOFTMAX, **options), progress=False)


class TwoTerms(SoftmaxCurvature):
    def diagonal(self, n: Tensor, r: Tensor, pairs: Pairs) -> Tensor:
        return super().diagonal(n, r, pairs).expand(-1, 2, -1)


def test_terms_that_have_no_name_are_refused():
    with pytest.raises(ValueError, match="TwoTerms.*2.*`terms` names 1"):
        diagonal_ggn(torch.eye(3), torch.eye(3), None, Pairs.by_label(torch.tensor([0, 0, 1])), TwoTerms(0.3))


def test_it_takes_fewer_than_30_lines():
    written = [line for line in inspect.getsource(softmax).splitlines() if line.strip()]
    assert len(written) < 30


def test_its_ggn_is_the_second_derivative_in_the_weights_with_the_others_held_still():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (3,)))
    pairs = Pairs.by_label(torch.tensor([0, 0, 1, 1, 1, 2]))
    got = diagonal_ggn(features, weight, bias, pairs, SOFTMAX)
    inputs, theta = torch.cat([features, torch.ones(6, 1).double()], 1), torch.cat([weight, bias[:, None]], 1)
    expected = torch.zeros_like(theta)
    for item in range(6):

        def loss(own: Tensor, item: int = item) -> Tensor:
            f = torch.stack([inputs[a] @ (own if a == item else theta).T for a in range(6)])
            unit = f / f.norm(dim=1, keepdim=True)
            total = torch.zeros((), dtype=torch.float64)
            for a in range(6):
                others = [b for b in range(6) if b != a]
                for b in others:
                    if pairs.positive[a, b]:
                        logits = torch.stack([unit[a] @ unit[c] / 0.3 for c in others])
                        total = total - (unit[a] @ unit[b] / 0.3 - logits.logsumexp(0))
            return total

        expected += torch.einsum("ijij->ij", torch.func.hessian(loss)(theta))
    assert got.counts == (6,)
    torch.testing.assert_close(got.h, expected / 6, rtol=1e-10, atol=1e-12)
    plain = diagonal_ggn(features, weight, bias, pairs, replace(SOFTMAX, average=False))
    torch.testing.assert_close(plain.h, expected, rtol=1e-10, atol=1e-12)


def test_it_is_fitted_saved_loaded_added_and_forgotten(tmp_path: Path):
    batches = make_batches(6)
    whole, first, second = fit(batches), fit(batches[:2]), fit(batches[2:])
    assert whole.posterior.curvature.counts == (96,)
    assert whole.posterior.curvature.sums.shape == (1, 3, 13)
    assert whole.embed(batches).kappa.isfinite().all()
    contrastive = lam.fit(make_network(), batches, lam.Laplace(margin=0.7, structure="diag"), progress=False)
    assert not torch.allclose(whole.posterior.curvature.h, contrastive.posterior.curvature.h)
    joined = first + second
    torch.testing.assert_close(joined.posterior.curvature.h, whole.posterior.curvature.h, rtol=1e-12, atol=1e-15)
    joined.forget(batches[2:])
    torch.testing.assert_close(joined.posterior.curvature.h, first.posterior.curvature.h, rtol=1e-9, atol=1e-12)
    assert joined.posterior.n_items == 32
    whole.save(tmp_path)
    loaded = lam.load(tmp_path, make_network())
    assert same_posterior(loaded, whole)
    assert loaded.posterior.curvature.curvature == SOFTMAX
    loaded.forget(batches[2:])
    torch.testing.assert_close(loaded.posterior.curvature.h, first.posterior.curvature.h, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="Diagonals.*same layer"):
        _ = whole.posterior.curvature + contrastive.posterior.curvature


def test_its_head_is_trained_and_its_triplets_are_chosen_by_a_margin_that_is_given():
    batches = make_batches()
    encoder = fit(batches, margin=0.7, head="train", dimension=3)
    assert encoder.posterior.weight.shape == (3, 3)
    mined = fit(batches, margin=0.7, pairs=Relation(miner="semihard"))
    assert mined.relation.triplet_margin == 0.7
    with pytest.raises(ValueError, match='head="train".*margin'):
        fit(batches, head="train")
    with pytest.raises(ValueError, match="semihard triplets.*margin"):
        fit(batches, pairs=Relation(miner="semihard"))


def test_over_a_data_set_it_takes_features_that_are_held_at_once():
    inputs, labels = make_batches(1, N=40)[0]
    alone = lam.fit_features(inputs, labels, torch.randn(3, 6), options=lam.Laplace(curvature=SOFTMAX))
    assert alone.posterior.curvature.counts == (40,)
    with pytest.raises(ValueError, match="pairs.*batch.*SoftmaxCurvature"):
        fit([(inputs, labels)], pairs="dataset")


def test_what_is_not_registered_is_neither_saved_nor_loaded(tmp_path: Path):
    encoder = fit(make_batches())
    encoder.save(tmp_path / "registered")
    del CURVATURES["softmax"]
    with pytest.raises(ValueError, match="SoftmaxCurvature.*name"):
        encoder.save(tmp_path / "unknown")
    with pytest.raises(ValueError, match="curvature.*'softmax'"):
        lam.load(tmp_path / "registered", make_network())


def test_a_name_is_given_once():
    register("contrastive", ContrastiveCurvature)
    with pytest.raises(ValueError, match="'contrastive' already.*ContrastiveCurvature"):
        register("contrastive", SoftmaxCurvature)


def test_a_curvature_needs_its_diagonal():
    with pytest.raises(TypeError, match="abstract"):
        Curvature()  # pyright: ignore[reportAbstractUsage]

"""The losses of von Mises-Fisher distributions against slow loops in float64, at their limits and at the edges."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lam.losses import ELK, HIB, ConcentrationAlignment, DistributionLoss, Explicit, InfoNCE, MCInfoNCE
from lam.losses.distributions import drawn_negatives, log_expected_likelihood
from lam.pairs import Pairs
from lam.vmf import VonMisesFisher, log_normalizer
from tests.losses.test_losses import PAIRS, infonce_by_loop, unit

KAPPA = torch.tensor([0.5, 3.0, 20.0, 8.0, 90.0, 1.5], dtype=torch.float64)
LOSSES: dict[str, DistributionLoss] = {
    "mc_infonce": MCInfoNCE(5.0, 7, learn_kappa_pos=True),
    "hib": HIB(7, 1.3, 0.4),
    "elk": ELK(0.8),
    "square": ConcentrationAlignment(Explicit(0.3, decay=0.02)),
    "likelihood": ConcentrationAlignment(Explicit(0.3, "likelihood")),
}
WITH_POSITIVES = [kind for kind in PAIRS if kind != "no positives"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_loop(name: str, loss: Any, mean: Tensor, kappa: Tensor, pairs: Pairs) -> Tensor:
    if name in ("mc_infonce", "hib"):
        samples = VonMisesFisher(mean, kappa).rsample((loss.n_samples,), generator=generator())
        return (mc_infonce_by_loop if name == "mc_infonce" else hib_by_loop)(loss, samples, pairs)
    if name == "elk":
        return infonce_by_loop(loss.kappa_pos * torch.stack([elk_row(mean, kappa, a) for a in range(6)]), pairs)
    total, count = 0.0 * mean.sum(), 0.0
    for a in range(6):
        for b in range(a):
            if weight := float(pairs.positive[a, b]):
                of_pair = -loss.explicit.weight * (kappa[a] + kappa[b]) * (mean[a] @ mean[b])
                for k in (kappa[a], kappa[b]):
                    of_pair = of_pair + (loss.explicit.decay * k**2 if name == "square" else k - 3 / 2 * k.log())
                total, count = total + weight * of_pair, count + weight
    return total / count + infonce_by_loop(mean @ mean.T / loss.temperature, pairs)


def mc_infonce_by_loop(loss: Any, samples: Tensor, pairs: Pairs) -> Tensor:
    kappa_pos, total, count = loss.log_kappa_pos.exp(), 0.0 * samples.sum(), 0.0
    for a in range(6):
        for p in range(6):
            if weight := float(pairs.positive[a, p]):
                ratios = []
                for z in samples:
                    own = (kappa_pos * (z[a] @ z[p])).exp()
                    others = [float(pairs.negative[a, n]) * (kappa_pos * (z[a] @ z[n])).exp() for n in range(6)]
                    ratios.append(own / (own + sum(others)))
                total, count = total - weight * torch.stack(ratios).mean().log(), count + weight
    return total / count


def hib_by_loop(loss: Any, samples: Tensor, pairs: Pairs) -> Tensor:
    sums = {kind: (0.0 * samples.sum(), 0.0) for kind in ("positive", "negative")}
    for kind, (total, count) in sums.items():
        for a in range(6):
            for b in range(6):
                if weight := float(getattr(pairs, kind)[a, b]):
                    matches = torch.stack([torch.sigmoid(loss.scale * (z[a] @ z[b]) + loss.offset) for z in samples])
                    probability = matches.mean() if kind == "positive" else (1 - matches).mean()
                    total, count = total - weight * probability.log(), count + weight
        sums[kind] = total, count
    return sum((total / (count or 1) for total, count in sums.values()), start=torch.tensor(0.0))


def elk_row(mean: Tensor, kappa: Tensor, a: int) -> Tensor:
    """The similarities of item a to all items: log C(κ₁) + log C(κ₂) − log C(‖κ₁μ₁ + κ₂μ₂‖)."""

    def similarity(b: int) -> Tensor:
        fused = (kappa[a] * mean[a] + kappa[b] * mean[b]).norm()
        return log_normalizer(4, kappa[a]) + log_normalizer(4, kappa[b]) - log_normalizer(4, fused)

    return torch.stack([similarity(b) for b in range(6)])


def drawn_apart() -> Pairs:
    """Pairs in which only two items are negatives, and these are not anchors."""
    negative = torch.zeros(6, 6, dtype=torch.bool)
    negative[:4, 4:] = True
    positive = torch.zeros(6, 6, dtype=torch.bool)
    positive[torch.arange(4), torch.tensor([1, 0, 3, 2])] = True
    return Pairs(positive, negative, 4, 8)


def test_negatives_drawn_apart_are_those_of_the_loop() -> None:
    mean, kappa, loss = unit(6, 4).requires_grad_(), KAPPA.clone().requires_grad_(), MCInfoNCE(5.0, 7).double()
    value = loss(mean, kappa, drawn_apart(), generator=generator(3))
    samples = VonMisesFisher(mean, kappa).rsample((7,), generator=generator(3))
    expected = mc_infonce_by_loop(loss, samples, drawn_apart())
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    gradients = torch.autograd.grad(value, [mean, kappa], retain_graph=True)
    for gradient, slow in zip(gradients, torch.autograd.grad(expected, [mean, kappa]), strict=True):
        torch.testing.assert_close(gradient, slow, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", WITH_POSITIVES)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradients_equal_the_loop(name: str, kind: str) -> None:
    raw, kappa, loss = (3 * unit(6, 4)).requires_grad_(), KAPPA.clone().requires_grad_(), LOSSES[name].double()
    mean = F.normalize(raw)
    value = loss(mean, kappa, PAIRS[kind], generator=generator())
    expected = by_loop(name, loss, mean, kappa, PAIRS[kind])
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)
    learned = [raw, kappa, *loss.parameters()]
    gradients = torch.autograd.grad(value, learned, retain_graph=True)
    for gradient, slow in zip(gradients, torch.autograd.grad(expected, learned), strict=True):
        torch.testing.assert_close(gradient, slow, rtol=1e-6, atol=1e-8)


def test_mc_infonce_of_points_is_infonce_and_one_sample_of_one_is_itself() -> None:
    mean, pairs = unit(6, 4), PAIRS["labels"]
    expected = InfoNCE(0.7, temperature=1 / 5)(mean, pairs)
    for kappa in (1e8, math.inf):
        value = MCInfoNCE(5.0, 3).double()(mean, torch.full((6,), kappa).double(), pairs, generator=generator())
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3)
    near = MCInfoNCE(5.0, 1).double()(mean, torch.full((6,), 1e6).double(), pairs)
    torch.testing.assert_close(near, expected, rtol=1e-2, atol=1e-2)


def test_the_expected_likelihood_is_the_mean_density_of_samples() -> None:
    mean, kappa = unit(2, 3, seed=5), torch.tensor([4.0, 9.0], dtype=torch.float64)
    samples = VonMisesFisher(mean[0], kappa[0]).sample((200_000,), generator=generator())
    estimate = VonMisesFisher(mean[1], kappa[1]).log_prob(samples).exp().mean().log()
    value = log_expected_likelihood(mean[0], kappa[0], mean[1], kappa[1])
    assert float(value) == pytest.approx(float(estimate), abs=0.01)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kappa", [0.0, 1e-6, 1e8, math.inf])
def test_extreme_concentrations_give_no_nan(name: str, kappa: float) -> None:
    mean = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    kappas = torch.full((4,), kappa, requires_grad=True)
    value = LOSSES[name].float()(mean, kappas, Pairs.by_label(torch.tensor([0, 0, 1, 1])), generator=generator())
    gradients = torch.autograd.grad(value, [mean, kappas])
    assert value.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_as_is_anything_under_autocast(name: str, dtype: torch.dtype) -> None:
    loss, pairs, mean, kappa = LOSSES[name].float(), PAIRS["labels"], unit(6, 4).to(dtype), KAPPA.to(dtype)
    expected = loss(mean.float(), kappa.float(), pairs, generator=generator())
    torch.testing.assert_close(loss(mean, kappa, pairs, generator=generator()), expected)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(loss(mean.float(), kappa.float(), pairs, generator=generator()), expected)


@pytest.mark.parametrize("name", ["mc_infonce", "hib"])
def test_samples_follow_the_generator(name: str) -> None:
    loss, mean, pairs = LOSSES[name].double(), unit(6, 4), PAIRS["labels"]
    one, same, other = (loss(mean, KAPPA, pairs, generator=generator(seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_the_best_concentration_of_the_square_is_the_alignment_over_twice_the_decay() -> None:
    mean, kappa = unit(2, 4, seed=2), torch.full((2,), 2.0, dtype=torch.float64, requires_grad=True)
    cosine = float(mean[0] @ mean[1])
    mean = mean if cosine > 0 else mean * torch.tensor([[1.0], [-1.0]])
    best = 0.05 * abs(cosine) / (2 * 0.005)
    value = ConcentrationAlignment(Explicit())(mean, kappa * best / 2, Pairs.by_label(torch.tensor([0, 0])))
    (gradient,) = torch.autograd.grad(value, kappa)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_negatives_are_drawn_from_those_of_the_anchor() -> None:
    pairs = PAIRS["labels"]
    drawn = drawn_negatives(pairs, 2, generator())
    assert (drawn.negative.sum(1) == 2).all()
    assert (drawn.negative <= pairs.negative).all()
    assert torch.equal(drawn.positive, pairs.positive)
    assert drawn_negatives(pairs, None, None) is pairs
    few = drawn_negatives(Pairs.by_label(torch.tensor([0, 0, 0, 1])), 3, generator())
    assert few.negative.sum(1).tolist() == [1, 1, 1, 3]
    for loss in (MCInfoNCE(n_negatives=1), HIB(n_negatives=1)):
        assert loss(unit(6, 4), KAPPA, pairs, generator=generator()).isfinite()


def test_kappa_pos_is_learned_or_stays() -> None:
    learned, fixed = MCInfoNCE(20.0, learn_kappa_pos=True), MCInfoNCE(20.0)
    learned(unit(6, 4), KAPPA, PAIRS["labels"]).backward()
    (parameter,) = learned.parameters()
    assert parameter.grad is not None
    assert parameter.grad != 0
    assert not list(fixed.parameters())
    assert fixed.state_dict().keys() == learned.state_dict().keys()


@pytest.mark.usefixtures("as_in_production")
def test_what_cannot_be_is_refused() -> None:
    for make, message in (
        (lambda: MCInfoNCE(0.0), "kappa_pos.*0"),
        (lambda: MCInfoNCE(1.0, 2.5), "n_samples.*2.5"),
        (lambda: MCInfoNCE(1.0, True), "n_samples.*True"),
        (lambda: MCInfoNCE(1.0, 0), "n_samples.*1.*0"),
        (lambda: MCInfoNCE(1.0, 1, 0), "n_negatives.*1.*0"),
        (lambda: ELK(-1.0), "kappa_pos.*-1"),
        (lambda: HIB(0), "n_samples.*1.*0"),
        (lambda: HIB(scale=0.0), "scale.*0"),
        (lambda: HIB(offset=math.nan), "offset.*nan"),
        (lambda: Explicit(0.0), "weight.*0"),
        (lambda: Explicit(decay=0.0), "decay.*0"),
        (lambda: Explicit(1.0, "cube"), "regulariser.*square, likelihood.*'cube'"),
        (lambda: ConcentrationAlignment(None, temperature=0.0), "temperature.*positive.*0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    for loss in LOSSES.values():
        with pytest.raises(ValueError, match="pair.*6.*positive"):
            loss(unit(6, 4), KAPPA, PAIRS["no positives"])
        with pytest.raises(ValueError, match=r"kappa.*\(\d+,\).*means.*\(\d+, 1\)"):
            loss(unit(6, 4), KAPPA[:, None], PAIRS["labels"])
        with pytest.raises(ValueError, match="kappa.*NaN.*index 2"):
            loss(unit(6, 4), KAPPA.index_fill(0, torch.tensor([2]), math.nan), PAIRS["labels"])
        with pytest.raises(ValueError, match="same 5.*pairs.*6"):
            loss(unit(5, 4), KAPPA[:5], PAIRS["labels"])

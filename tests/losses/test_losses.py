"""The training losses against a double loop over the pairs."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss

from lam import losses
from lam.losses.base import margin_of, settings_of, squared_distances, weighted_mean
from lam.pairs.pairs import Pairs
from lam.runs.config_files import load_config
from lam.runs.run import run
from tests.conftest import TINY

TRAINABLE = ("varcon", "aninfonce")  # these have their own tests
NAMES = [name for name in losses.LOSSES if name not in TRAINABLE]
SOFTMAX = ("infonce", "supcon", *TRAINABLE)  # these use only positive pairs


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def mined() -> Pairs:
    tuples = (torch.tensor([0, 0, 2]), torch.tensor([1, 1, 3]), torch.tensor([0, 4, 4]), torch.tensor([2, 1, 1]))
    return Pairs.from_tuples(tuples, 6, n_positives=8, n_negatives=22)


PAIRS = {
    "labels": Pairs.by_label(torch.tensor([0, 0, 1, 1, 1, 2])),
    "tuples": mined(),
    "no positives": Pairs.by_label(torch.arange(6)),
    "no negatives": Pairs.by_label(torch.zeros(6, dtype=torch.long)),
}


def by_loop(name: str, margin: float, embeddings: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Every loss from its definition, pair by pair."""
    if name == "supcon":
        return supcon_by_loop(embeddings, pairs)
    if name == "infonce":
        return infonce_by_loop(embeddings @ embeddings.T / losses.TEMPERATURE, pairs)
    attract, repel, n_attract, n_repel = 0.0 * embeddings.sum(), 0.0, 0.0, 0.0
    for a in range(pairs.size):
        for b in range(pairs.size):
            if a == b:
                continue
            distance = (embeddings[a] - embeddings[b]).norm()
            positive, negative = float(pairs.positive[a, b]), float(pairs.negative[a, b])
            inside = distance < margin
            attract = attract + positive * (distance if name == "pml" else distance**2)
            n_attract += positive
            if name == "log_posterior":
                repel, n_repel = repel + negative * inside * (margin**2 - distance**2), n_repel + negative
            else:
                gaps = {
                    "contrastive": (margin - distance) ** 2,
                    "squared": margin**2 - distance**2,
                    "pml": margin - distance,
                }
                repel, n_repel = repel + negative * inside * gaps[name], n_repel + negative * float(inside)
    if name == "log_posterior":
        return (attract / max(pairs.n_positives, 1) + repel / max(pairs.n_negatives, 1)) / 2
    return attract / (n_attract or 1) + repel / (n_repel or 1)


def supcon_by_loop(embeddings: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    losses_of_anchors = [0.0 * embeddings.sum()]
    for a in range(pairs.size):
        weights = [(b, float(pairs.positive[a, b]), float(pairs.negative[a, b])) for b in range(pairs.size) if a != b]
        n_positives = sum(positive for _, positive, _ in weights)
        if n_positives:
            cosines = {b: embeddings[a] @ embeddings[b] / losses.TEMPERATURE for b, _, _ in weights}
            total = sum((positive + negative) * cosines[b].exp() for b, positive, negative in weights)
            gains = [positive * (cosines[b] - torch.as_tensor(total).log()) for b, positive, _ in weights]
            losses_of_anchors.append(-sum(gains) / n_positives)
    return torch.stack(losses_of_anchors).sum() / max(1, len(losses_of_anchors) - 1)


def infonce_by_loop(logits: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    total, count = 0.0 * logits.sum(), 0.0
    for a in range(pairs.size):
        for p in range(pairs.size):
            if weight := float(pairs.positive[a, p]):
                others = [float(pairs.negative[a, n]) * logits[a, n].exp() for n in range(pairs.size)]
                ratio = logits[a, p].exp() / (logits[a, p].exp() + sum(others))
                total, count = total - weight * ratio.log(), count + weight
    return total / (count or 1)


@pytest.mark.parametrize("margin", [0.05, 0.7, 2.0])
@pytest.mark.parametrize(
    ("name", "kind"), [pair for pair in product(NAMES, PAIRS) if pair not in product(SOFTMAX, ["no positives"])]
)
def test_value_and_gradient_equal_the_loop(name: str, margin: float, kind: str) -> None:
    raw = (3 * unit(6, 4)).requires_grad_()
    embeddings = torch.nn.functional.normalize(raw)
    value = losses.build(name, margin=margin)(embeddings, PAIRS[kind])
    expected = by_loop(name, margin, embeddings, PAIRS[kind])
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    (gradient,) = torch.autograd.grad(value, raw, retain_graph=True)
    (slow,) = torch.autograd.grad(expected, raw)
    torch.testing.assert_close(gradient, slow, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name: str) -> None:
    embeddings = unit(6, 3, seed=1).requires_grad_()
    loss = losses.build(name, margin=0.9)
    assert torch.autograd.gradcheck(lambda e: loss(e, PAIRS["labels"]), embeddings)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_is_finite_at_distance_zero_and_at_the_margin(name: str, dtype: torch.dtype) -> None:
    corner = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=dtype)
    embeddings = corner.requires_grad_()
    for margin in (2**0.5, 2.0):
        value = losses.build(name, margin=margin)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1, 1, 0])))
        (gradient,) = torch.autograd.grad(value, embeddings)
        assert value.isfinite()
        assert value.dtype == dtype
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_as_is_anything_under_autocast(name: str, dtype: torch.dtype) -> None:
    half, pairs = unit(300, 4).to(dtype).requires_grad_(), Pairs.by_label(torch.arange(300) % 100)  # 89,100 negatives
    loss, wide = losses.build(name, margin=0.9, dimension=4), half.detach().float().requires_grad_()
    expected = loss(wide, pairs)
    (slow,) = torch.autograd.grad(expected, wide)
    value = loss(half, pairs)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, half)[0], slow.to(dtype))
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(loss(wide, pairs), expected)


def test_log_posterior_is_the_weighted_sum_up_to_a_constant() -> None:
    pairs, margin = PAIRS["labels"], 1.1
    loss = losses.build("log_posterior", margin=margin)
    embeddings = unit(6, 4)
    squared = torch.cdist(embeddings, embeddings).square()
    inside = pairs.negative & (squared < margin**2)
    targets = pairs.positive / pairs.n_positives - inside / pairs.n_negatives
    constant = margin**2 / 2 * inside.sum() / pairs.n_negatives
    torch.testing.assert_close(loss(embeddings, pairs), (targets * squared).sum() / 2 + constant)


def test_pml_equals_the_library_called_with_labels() -> None:
    labels, embeddings = torch.tensor([0, 0, 1, 1, 1, 2]), unit(6, 4)
    expected = ContrastiveLoss(neg_margin=0.7)(embeddings, labels)
    torch.testing.assert_close(losses.build("pml", margin=0.7)(embeddings, Pairs.by_label(labels)), expected)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_without_any_pair_or_of_none_that_a_miner_chose_the_loss_is_zero_and_differentiable(name: str) -> None:
    embeddings, none = unit(3, 3).float().requires_grad_(), torch.zeros(3, 3)
    n_positives = 2 if name in SOFTMAX else 0
    loss = losses.build(name, margin=0.7, dimension=3)
    value = loss(embeddings, Pairs(none, none, n_positives, 4, torch.tensor([0, 0, 1])))
    value.backward()
    assert value == 0
    assert (embeddings.grad == 0).all()


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_losses_refuse_pairs_none_of_which_is_positive(name: str) -> None:
    with pytest.raises(ValueError, match="pair.*6.*per_class"):
        losses.build(name, margin=0.7, dimension=4)(unit(6, 4), PAIRS["no positives"])


@pytest.mark.parametrize("margin", [0.0, -1.0, 2.1, float("nan")])
def test_margin_outside_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match=r"margin.*\(0, 2\].*got"):
        losses.build("contrastive", margin=margin)


def test_unknown_name_lists_the_allowed() -> None:
    with pytest.raises(ValueError, match="contrastive, log_.*'triplet'.*lam.losses"):
        losses.build("triplet", margin=0.7)


def test_pairs_of_another_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="same 5.*pairs.*6"):
        losses.build("contrastive", margin=0.7)(unit(5, 3), PAIRS["labels"])


class Cubes(losses.Loss):
    """Mean cubed distance of the positive pairs; a loss without settings."""

    def _compute(self, embeddings: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        squared = squared_distances(embeddings) + torch.eye(len(embeddings))
        return weighted_mean(squared**1.5, pairs.positive)


class Powers(Cubes):
    def __init__(self, power: float) -> None:
        self.power = power


def test_a_loss_that_needs_what_no_configuration_gives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOSSES", {"powers": Powers})
    with pytest.raises(ValueError, match="Powers.*margin.*'power'"):
        losses.build("powers", margin=0.7)


@pytest.mark.long
def test_a_loss_from_outside_trains_a_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["digits", "deterministic"], ["--training.loss=cubes", f"--output={tmp_path / 'run'}", *TINY]
    with pytest.raises(ValueError, match="training.loss.*'cubes'.*lam.losses"):
        load_config(*arguments)
    monkeypatch.setattr(losses, "LOSSES", dict(losses.LOSSES))
    losses.register("cubes", Cubes)
    losses.register("cubes", Cubes)
    assert isinstance(losses.build("cubes", margin=0.7), Cubes)
    with pytest.raises(ValueError, match="'cubes' already.*Cubes"):
        losses.register("cubes", losses.Squared)
    finished = run(load_config(*arguments), progress=False)
    assert load_config(finished.folder / "config.yaml").training.loss == "cubes"
    own = [f"--checkpoint={finished.folder}", "--method.curvature=own", f"--output={tmp_path / 'own'}", *TINY]
    with pytest.raises(ValueError, match="no curvature.*own"):
        run(load_config(["digits", "laplace_posthoc"], own), progress=False)


def test_a_loss_of_ones_own_has_the_margin_that_it_holds() -> None:
    class Own(losses.Loss):
        def __init__(self, margin: float) -> None:
            self.margin = margin

        def _compute(self, embeddings: torch.Tensor, pairs: Pairs) -> torch.Tensor:
            return embeddings.sum()

    assert margin_of(Own(0.4)) == 0.4
    assert settings_of(Own(0.4))["margin"] == 0.4


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5)])
def test_learned_values_that_are_no_lists_are_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses.SupCon, "learned", lambda _: {"scale": value})
    with pytest.raises(ValueError, match=r"{'scale': .*0.5.*\[value\]"):
        settings_of(losses.SupCon())

"""The uncertainty head: its formula, its shared scale and shift, and its initial values."""

import json

import pytest
import torch
from torch import Tensor

from lam.models.kappa_head import UncertaintyHead
from tests.helpers import unchecked


def _standardised(values: Tensor) -> Tensor:
    return (values - values.mean(0)) / (values.var(0, unbiased=False) + 1e-5).sqrt()


@pytest.mark.parametrize("shared", [True, False])
def test_training_mode_is_the_formula(shared: bool) -> None:
    head = UncertaintyHead(7, 4, shared=shared, seed=1).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    features = torch.randn(9, 7, dtype=torch.float64)
    own = dict(head.layers.named_parameters())
    hidden = _standardised(features @ own["0.weight"].T + own["0.bias"]) * own["1.weight"] + own["1.bias"]
    last = _standardised(hidden.clamp(min=0) @ own["3.weight"].T + own["3.bias"])
    torch.testing.assert_close(head(features), head.scale * last + head.shift, rtol=1e-10, atol=1e-12)
    assert head(features).dtype == torch.float64


@pytest.mark.parametrize(("shared", "shape"), [(True, ()), (False, (4,))])
def test_scale_and_shift_are_shared_or_one_a_dimension(shared: bool, shape: tuple[int, ...]) -> None:
    head = UncertaintyHead(7, 4, shared=shared)
    assert head.scale.shape == head.shift.shape == shape
    head(torch.randn(9, 7)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in head.parameters())
    assert head.shift.grad is not None
    assert head.shift.grad.shape == shape


@pytest.mark.parametrize("shared", [True, False])
def test_the_variance_begins_near_one_value(shared: bool) -> None:
    log_variance = UncertaintyHead(7, 4, shared=shared)(torch.randn(50, 7))
    torch.testing.assert_close(log_variance, torch.full((50, 4), -7.0), rtol=0, atol=1e-3)


def test_prediction_of_an_item_does_not_depend_on_its_batch() -> None:
    head, features = UncertaintyHead(7, 4), torch.randn(20, 7)
    with torch.no_grad():
        head.scale.fill_(1.0)
        head(features)
        head.eval()
        torch.testing.assert_close(torch.cat([head(row[None]) for row in features]), head(features))


def test_seed_decides_the_weights_and_the_recipe_rebuilds_them() -> None:
    state = torch.get_rng_state()
    first, same, other = (UncertaintyHead(7, 4, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.layers[0].weight, same.layers[0].weight)
    assert not torch.equal(first.layers[0].weight, other.layers[0].weight)
    other = UncertaintyHead(**json.loads(json.dumps(first.recipe)), seed=5)
    other.load_state_dict(first.state_dict())
    features = torch.randn(3, 7)
    assert torch.equal(other.eval()(features), first.eval()(features))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="features.*1.*0"):
        UncertaintyHead(0, 4)
    head = UncertaintyHead(7, 4)
    with pytest.raises(ValueError, match=r"features.*\(N, 7\).*\(3, 6\)"):
        head(torch.zeros(3, 6))
    with pytest.raises(ValueError, match="2 items.*1.*eval"):
        head(torch.zeros(1, 7))
    with pytest.raises(ValueError, match=r"features.*\(N, 7\).*\(7,\)"):
        unchecked(UncertaintyHead.forward)(head, torch.zeros(7))

"""Networks inside wrappers, of torch.compile or of parallel training: saved tensors have their plain names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lam
from lam import models
from lam.encoders.ensemble import DropoutEncoder, EnsembleEncoder
from lam.models.weights import load_weights, own_path
from tests.encoders.small import fit, make_batches, make_network


def compiled(network: nn.Module) -> nn.Module:
    return torch.compile(network, backend="eager")


def partly_compiled(network: nn.Sequential) -> nn.Module:
    return nn.Sequential(compiled(network[0]), network[1], compiled(network[2]))


def compiled_in_place(network: nn.Module) -> nn.Module:
    network.compile(backend="eager")
    return network


def with_compiled_forward(network: nn.Module) -> nn.Module:
    network.forward = torch.compile(network.forward, backend="eager")
    return network


@torch.no_grad()
def after_a_pass(network: nn.Module, inputs: torch.Tensor) -> nn.Module:
    """The network once torch has compiled it without lam's hooks."""
    network.eval()(inputs)
    return network


WRAPPERS = [
    pytest.param(lambda network: network, id="plain"),
    pytest.param(compiled, id="compiled"),
    pytest.param(partly_compiled, id="partly"),
    pytest.param(nn.DataParallel, id="parallel"),
    pytest.param(lambda network: nn.DataParallel(compiled(network)), id="both"),
]


@pytest.mark.long
@pytest.mark.parametrize("given", WRAPPERS)
@pytest.mark.parametrize("wrapped", WRAPPERS)
def test_an_encoder_saved_from_one_is_loaded_into_any_other(
    wrapped: Callable[[nn.Module], nn.Module], given: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    data = make_batches()
    encoder = lam.fit(wrapped(make_network()), data, margin=0.7, progress=False)
    encoder.save(tmp_path)
    loaded = lam.load(tmp_path, given(make_network(seed=1)))
    torch.testing.assert_close(loaded.embed(data).kappa, fit(data).embed(data).kappa)
    assert isinstance(loaded, lam.BayesianEncoder)
    loaded.forget([data[0]])
    loaded.save(tmp_path)
    assert lam.load(tmp_path, make_network()).head == "2"


@pytest.mark.parametrize("given", [make_network, lambda seed: AveragedModel(make_network(seed))])
def test_an_encoder_of_averaged_weights_is_loaded_into_a_plain_or_an_averaged_network(
    given: Callable[[int], nn.Module], tmp_path: Path
) -> None:
    data = make_batches()
    lam.fit(AveragedModel(make_network()), data, margin=0.7, progress=False).save(tmp_path)
    torch.testing.assert_close(lam.load(tmp_path, given(1)).embed(data).kappa, fit(data).embed(data).kappa)


def test_encoders_of_one_network_add_up_whether_it_is_compiled_or_not() -> None:
    data = make_batches()
    whole = lam.fit(compiled(make_network()), data[:2], margin=0.7, progress=False) + fit(data[2:])
    torch.testing.assert_close(whole.embed(data).kappa, fit(data).embed(data).kappa)


def test_a_compiled_network_that_lam_builds_by_name_is_rebuilt_plain(tmp_path: Path) -> None:
    images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    network = models.build("convnet8", dimension=3)
    plain = lam.fit(network, [(images, torch.arange(32) % 4)], margin=0.7, progress=False)
    relation, head = plain.relation, f"_orig_mod.{plain.head}"
    lam.BayesianEncoder(compiled(network), head, plain.posterior, relation=relation).save(tmp_path)
    loaded = lam.load(tmp_path)
    assert loaded.head == plain.head
    assert torch.equal(loaded.embed(images).kappa, plain.embed(images).kappa)


@pytest.mark.parametrize("wrapped", [compiled, partly_compiled, compiled_in_place, with_compiled_forward])
@pytest.mark.parametrize("settings", [{}, {"layers": "all"}])
def test_a_compiled_network_may_run_by_itself_before_the_fit_and_after(
    wrapped: Callable[[nn.Module], nn.Module], settings: dict[str, Any]
) -> None:
    data = make_batches()
    network = after_a_pass(wrapped(make_network()), data[0][0])
    encoder = lam.fit(network, data, lam.Laplace(margin=0.7, **settings), progress=False)
    after_a_pass(network, data[1][0])
    torch.testing.assert_close(encoder.embed(data).kappa, fit(data, **settings).embed(data).kappa)


@pytest.mark.parametrize("wrapped", WRAPPERS)
def test_a_network_drops_the_same_in_a_wrapper_or_not(wrapped: Callable[[nn.Module], nn.Module]) -> None:
    def kappa(wrap: Callable[[nn.Module], nn.Module]) -> torch.Tensor:
        (body, relu, head), inputs = make_network(), make_batches()[0][0]
        network = wrap(nn.Sequential(nn.Sequential(body, relu, nn.Dropout(0.2)), nn.Identity(), head))
        after_a_pass(network, inputs)
        return DropoutEncoder(network, own_path(network, "2"), seed=3).embed(inputs).kappa

    torch.testing.assert_close(kappa(wrapped), kappa(lambda network: network))


def test_compiled_members_of_an_ensemble_are_loaded_into_plain_ones(tmp_path: Path) -> None:
    inputs = make_batches()[0][0]
    encoder = EnsembleEncoder([compiled(make_network(seed)) for seed in range(2)], "_orig_mod.2", rotations=None)
    encoder.save(tmp_path)
    loaded = lam.load(tmp_path, nn.ModuleList([make_network(7), make_network(8)]))
    torch.testing.assert_close(loaded.embed(inputs).mean, encoder.embed(inputs).mean)


@pytest.mark.parametrize("given", WRAPPERS)
@pytest.mark.parametrize("wrapped", WRAPPERS)
def test_weights_of_one_are_taken_by_any_other(
    wrapped: Callable[[nn.Module], nn.Module], given: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    network, inputs = given(make_network(seed=1)), make_batches()[0][0]
    torch.save({"state_dict": wrapped(make_network()).state_dict()}, tmp_path / "weights.pth")
    load_weights(network, tmp_path / "weights.pth")
    with torch.no_grad():
        torch.testing.assert_close(network(inputs), make_network()(inputs))


def test_what_does_not_fit_is_named_as_the_network_has_it(tmp_path: Path) -> None:
    torch.save(make_network(D=4).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"_orig_mod\.2\.bias.*\(3,\).*\(4,\)"):
        load_weights(compiled(make_network()), tmp_path / "weights.pth")

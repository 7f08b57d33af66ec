"""Networks of users, which scale, normalise or parametrise their head; inputs and labels of other types."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lam
from lam import losses
from lam.encoders.deterministic import DeterministicEncoder
from lam.training import Training, train
from tests.encoders.small import fit, make_batches, make_network
from tests.helpers import run_python, unchecked

Change = Callable[[Tensor], Tensor]


class Ending(nn.Module):
    """A network that applies `change` to the output of its head."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.body, self.head, self.change = nn.Sequential(nn.Linear(6, 12), nn.ReLU()), nn.Linear(12, 4), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.head(self.body(x)))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: 16 * F.normalize(f),  # ArcFace
        lambda f: 16 * f,
        lambda f: f / f.abs().amax(1, keepdim=True),
    ],
)
def test_an_output_that_is_a_positive_multiple_of_the_heads_direction_is_taken(change: Change) -> None:
    network, batches = Ending(change), make_batches()
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    assert encoder.head == "head"
    with torch.no_grad():
        expected = F.normalize(network(batches[0][0]))
    assert torch.equal(encoder.embed(batches[0]).mean, expected)


@pytest.mark.parametrize(
    "change", [lambda f: -16 * f, F.relu, lambda f: f + 1, lambda f: f * f.new_tensor([1, 1, 1, 2])]
)
def test_an_output_in_another_direction_is_refused(change: Change) -> None:
    with pytest.raises(ValueError, match=r"no linear.*\(16, 4\)"):
        lam.fit(Ending(change), make_batches(), margin=0.7, progress=False)


@pytest.mark.parametrize(
    "parametrised",
    [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm],
)
def test_a_parametrised_network_in_training_is_left_as_it_was(parametrised: Callable[[nn.Linear], nn.Linear]) -> None:
    network = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), parametrised(nn.Linear(12, 4))).train()
    before, batches = copy.deepcopy(network.state_dict()), make_batches()
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    encoder.embed(batches)
    encoder.tune(batches, n_samples=4)
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(module.training for module in network.modules())


def test_a_fit_of_a_lower_layer_leaves_a_parametrised_head_as_it_was() -> None:
    head = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 4))
    network = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), head).train()
    before = copy.deepcopy(network.state_dict())
    lam.fit(network, make_batches(), lam.Laplace(margin=0.7, layers=["0"]), progress=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


class Reused(Ending):
    """A network that changes the head's input in place after the head, to save memory."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        output = self.head(features)
        features.mul_(-3)
        return output


def test_features_are_the_heads_inputs_also_if_they_change_later() -> None:
    network, batches = Reused(lambda f: f), make_batches()
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    with torch.no_grad():
        assert torch.equal(encoder.features(batches[0]), network.body(batches[0][0]))


def test_a_network_without_weights_is_refused() -> None:
    halfway = make_network()
    list(halfway.children())[-1].to("meta")
    for network in (make_network().to("meta"), halfway):
        with pytest.raises(ValueError, match="meta device.*no weights"):
            lam.fit(network, make_batches(), margin=0.7, progress=False)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (torch.float16, r"inputs.to\(torch.float32\)$"),
        (torch.float64, r"inputs.to\(torch.float32\)$"),
        (torch.uint8, r"inputs.to\(torch.float32\), scaled.*training$"),
    ],
)
def test_inputs_of_another_type_are_refused_in_words(dtype: torch.dtype, advice: str) -> None:
    batches = make_batches()
    others = [((10 * inputs).to(dtype), labels) for inputs, labels in batches]
    encoder = fit(batches)
    said = f"inputs of {dtype} .*torch.float32.*{advice}"
    for call in (lambda: fit(others), lambda: encoder.embed(others), lambda: encoder.predict(others[0])):
        with pytest.raises(ValueError, match=said):
            call()


def test_inputs_and_features_without_values_or_of_integers_are_refused() -> None:
    batches, encoder = make_batches(), fit()
    for call in (fit, encoder.embed):
        with pytest.raises(ValueError, match="inputs.*meta device"):
            call([(inputs.to("meta"), labels) for inputs, labels in batches])
    features, labels, weight = torch.randn(8, 6), torch.arange(8) % 2, torch.randn(3, 6)
    for given, message in (
        ((features.to("meta"), weight), "features.*values"),
        ((features, weight.to("meta")), "weight.*values"),
        ((features.byte(), weight), "features.*torch.uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            unchecked(lam.fit_features)(given[0], labels, given[1], margin=0.7)


def test_outputs_that_are_too_large_are_called_so() -> None:
    network = make_network()
    with torch.no_grad():
        list(network.children())[-1].weight.mul_(1e30)
    with pytest.raises(ValueError, match=r"outputs.*4.3e\+09.*size.*item 0, output \d"):
        lam.fit(network, make_batches(), lam.Laplace(margin=0.7, layers="all"), progress=False)


def test_rows_of_another_length_are_refused_with_their_shape() -> None:
    with pytest.raises(ValueError, match=r"inputs.*\(16, 5\).*row for each"):
        fit([(torch.randn(16, 5), torch.arange(16) % 4)])
    with pytest.raises(ValueError, match=r"shape \(12,\).*inputs\[None\]"):
        fit(make_batches()).embed(make_batches()[0][0][0])
    with pytest.raises(ValueError, match=r"inputs.*\(4,\) \(Dimension.*inputs\[None\]"):
        lam.fit(nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1)), [(torch.randn(4), 0)], margin=0.7)


@pytest.mark.parametrize("network", [make_network().to("meta"), nn.Sequential(*make_network()[:2], nn.LazyLinear(3))])
def test_a_network_without_memory_is_refused_on_loading(network: nn.Module, tmp_path: Path) -> None:
    fit(make_batches()).save(tmp_path)
    with pytest.raises(ValueError, match=r"no memory for \d.weight"):
        lam.load(tmp_path, network)


def test_a_state_that_is_no_tensor_is_named_before_training_and_saving(tmp_path: Path) -> None:
    class Versioned(nn.Sequential):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

    network = Versioned(*make_network())
    encoder = lam.fit(network, make_batches(), margin=0.7, progress=False)
    message = "state_dict.*dict at '_extra_state'.*get_extra_state"
    with pytest.raises(ValueError, match=message):
        encoder.save(tmp_path / "encoder")
    with pytest.raises(ValueError, match=message):
        train(network, [], Training(loss=losses.build(margin=0.7), epochs=1))


def test_a_network_that_branches_on_values_cannot_be_exported(tmp_path: Path) -> None:
    batches = make_batches()
    encoder = lam.fit(Ending(lambda f: 2 * f if f.mean() > 0 else f), batches, margin=0.7, progress=False)
    with pytest.raises(ValueError, match="cannot be exported"):
        encoder.export(tmp_path / "encoder.pt2", batches[0][0])
    assert not list(tmp_path.iterdir())


def test_errors_of_the_network_itself_are_its_own() -> None:
    class Broken(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise RuntimeError("no space left on the device")

    with pytest.raises(RuntimeError, match="^no space left.*device$"):
        lam.fit(Broken(6, 3), make_batches(), margin=0.7, progress=False)


@pytest.mark.parametrize(
    "named", [lambda labels: [f"class {n}" for n in labels], lambda labels: np.array(["a", "b"])[labels % 2]]
)
def test_labels_that_are_text_are_refused(named: Callable[[Tensor], Any]) -> None:
    batches = make_batches()
    others = [(inputs, named(labels)) for inputs, labels in batches]
    encoder = fit(batches)
    for call in (lambda: fit(others), lambda: lam.evaluate(encoder, others), lambda: encoder.tune(others)):
        with pytest.raises(ValueError, match="integers.*got.*number the classes"):
            call()
    features = torch.randn(6, 5)
    with pytest.raises(ValueError, match="labels.*integers"):
        unchecked(lam.fit_features)(features, ["a", "b"] * 3, torch.eye(3, 5), margin=0.7)


@pytest.mark.long
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_it_is_the_same_where_torch_takes_no_gradients(off: Callable[[], Any]) -> None:
    network, batches = make_network(), make_batches()

    def numbers() -> list[Tensor]:
        fits = [
            lam.fit(network, batches, lam.Laplace(margin=0.7, **options), progress=False)
            for options in ({}, {"head": "train"}, {"layers": "all"})
        ]
        fits[0].trained_on = []
        fits[0].learn_ambiguity(batches)
        return [encoder.embed(batches).kappa for encoder in fits]

    with off():
        found = numbers()
    torch.testing.assert_close(found, numbers(), rtol=0, atol=0)


class Gated(nn.Module):
    """Multiplies its input by a layer's output, so autograd saves the input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.gate(inputs) * inputs)


def test_inputs_may_be_made_in_inference_mode() -> None:
    network, options = Gated(), lam.Laplace(margin=0.7, layers="all")

    def kappa() -> Tensor:
        batches = make_batches()
        return lam.fit(network, batches, options, progress=False).embed(batches).kappa

    with torch.inference_mode():
        found = kappa()
    assert torch.equal(found, kappa())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.bool])
def test_labels_are_of_any_type_of_integers(dtype: torch.dtype) -> None:
    batches = [(inputs, labels % 2) for inputs, labels in make_batches()]
    others = [(inputs, labels.to(dtype)) for inputs, labels in batches]
    features, labels = torch.cat([inputs for inputs, _ in batches]), torch.cat([labels for _, labels in batches])

    def numbers(given: Any, labels: Tensor) -> list[Any]:
        encoder = fit(given)
        encoder.tune(given, n_samples=4)
        stored = lam.fit_features(features, labels, torch.eye(3, 6), margin=0.7)
        return [
            encoder.posterior.scale,
            lam.evaluate(encoder, given, n_samples=4).metrics,
            stored.posterior.curvature.h.sum(),
            fit(given, pairs="dataset").posterior.curvature.h.sum(),
        ]

    assert numbers(others, labels.to(dtype)) == numbers(batches, labels)


class Stream(torch.utils.data.IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([pair for inputs, labels in make_batches() for pair in zip(inputs, labels, strict=True)])


def test_a_loader_of_a_stream_is_fitted_to() -> None:
    batches = make_batches()
    loader: Any = torch.utils.data.DataLoader(Stream(), batch_size=len(batches[0][0]))
    streamed = lam.fit(make_network(), loader, margin=0.7, progress=False)
    assert isinstance(streamed, lam.BayesianEncoder)
    torch.testing.assert_close(streamed.posterior.curvature.h, fit(batches).posterior.curvature.h)


def test_labels_in_the_byte_order_of_another_machine_are_read_and_complex_ones_refused() -> None:
    def batches(kind: str) -> list[Any]:
        return [(inputs, labels.numpy().astype(kind)) for inputs, labels in make_batches()]

    assert torch.equal(fit(batches(">i8")).posterior.curvature.h, fit(batches("<i8")).posterior.curvature.h)
    with pytest.raises(ValueError, match=r"labels.*torch\.complex64"):
        fit(batches("complex64"))


@pytest.mark.parametrize(
    ("outputs", "classes", "whose"), [(1000, 4, "ImageNet"), (120, 120, "the data"), (21843, 4, "ImageNet")]
)
def test_a_head_that_looks_like_class_logits_gets_a_hint(outputs: int, classes: int, whose: str) -> None:
    network, labels = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs)), torch.arange(240) % classes
    loader = torch.utils.data.DataLoader(Labelled(torch.randn(240, 6), labels), batch_size=240)
    with pytest.warns(UserWarning, match=f"last layer, 2.*{outputs} outputs.*{whose}.*classes"):
        lam.fit(network, loader, margin=0.7, progress=False)


@pytest.mark.parametrize("added", [{"head": "identity"}, {"head": "train", "dimension": 3}])
def test_so_does_a_network_that_gets_a_layer_of_its_own(added: dict[str, Any]) -> None:
    network, labels = nn.Linear(6, 120), torch.arange(240) % 120
    loader = torch.utils.data.DataLoader(Labelled(torch.randn(240, 6), labels), batch_size=240)
    with pytest.warns(UserWarning, match="network itself, has 120 outputs"):
        lam.fit(network, loader, lam.Laplace(margin=0.7, **added), progress=False)


def test_what_takes_too_much_memory_is_not_advised_to_be_what_it_is() -> None:
    with pytest.raises(ValueError, match=r'structure="diag" .* more than max_memory, 10: allow more$'):
        lam.fit(
            make_network(), make_batches(), lam.Laplace(margin=0.7, structure="diag", max_memory=10), progress=False
        )


def test_an_embedding_gets_no_such_hint() -> None:
    loader = torch.utils.data.DataLoader(Labelled(torch.randn(240, 6), torch.arange(240) % 4), batch_size=240)
    lam.fit(make_network(D=4), loader, margin=0.7, progress=False)
    lam.fit(make_network(D=128), loader, margin=0.7, progress=False)


class Labelled(torch.utils.data.TensorDataset):
    """A data set with an attribute `labels`."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        super().__init__(inputs, labels)
        self.labels = labels


def test_a_kappa_that_is_one_constant_is_told() -> None:
    batches = make_batches()
    sure = fit(batches, prior_precision=1e12, likelihood_scale=1e30)
    with pytest.warns(UserWarning, match=r"κ.*1e\+08.*64 queries.*no answers"):
        lam.evaluate(sure, batches)
    lam.evaluate(fit(batches), batches)
    lam.evaluate(DeterministicEncoder(make_network(), "2"), batches)


def test_inputs_that_a_batch_norm_refuses_are_refused_in_words() -> None:
    network = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))
    encoder = lam.fit(network, make_batches(), margin=0.7, progress=False)
    with pytest.raises(ValueError, match=r"inputs.*\(6,\).*row for each"):
        encoder.embed(list(make_batches()[0][0]))


def test_a_layer_is_trained_whatever_the_default_type_and_draws_nothing() -> None:
    options = lam.Laplace(margin=0.7, head="train")
    expected = lam.fit(make_network(), make_batches(), options, progress=False)
    network, batches, state = make_network(), make_batches(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        found = lam.fit(network, batches, options, progress=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found.posterior.weight, expected.posterior.weight)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.long
def test_warnings_name_the_line_that_called() -> None:
    run_python("-c", WARNED)


WARNED = """
import warnings, torch, lam
from torch import nn
inputs, labels = torch.randn(64, 6), torch.arange(64) % 4
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    encoder = lam.fit(nn.Linear(6, 1000), [(inputs, labels)], lam.Laplace(margin=0.7, structure="diag"), progress=False)
    encoder.learn_ambiguity([(inputs, labels)])
assert [each.filename for each in caught] == ["<string>"] * 2, [str(each) for each in caught]
"""

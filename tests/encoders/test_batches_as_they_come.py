"""Batches and networks of other libraries: named labels, arrays, TorchScript."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import lam
from lam import models
from lam.encoders.deterministic import DeterministicEncoder
from lam.methods.laplace import Laplace
from tests.encoders.small import make_batches, make_network


class ByName(nn.Module):
    """A network that takes its inputs by the name that transformers gives images."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.network(pixel_values)


class Masked(nn.Module):
    """A network of two inputs."""

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return inputs * mask


def scripted_network(inputs: Tensor) -> Any:
    return torch.jit.trace(make_network().eval(), inputs)


def test_labels_among_named_inputs_are_targets() -> None:
    batches = make_batches()
    named = [{"pixel_values": inputs, "labels": labels} for inputs, labels in batches]
    encoder = lam.fit(ByName(), named, margin=0.7, progress=False)
    expected = lam.fit(make_network(), batches, margin=0.7, progress=False)
    assert torch.equal(encoder.embed(named).kappa, expected.embed(batches).kappa)
    assert torch.equal(encoder.embed(named[0]).kappa, expected.embed(batches[0]).kappa)


class WithPositions(nn.Module):
    """A network that also takes inputs without a row for each item."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def forward(self, pixel_values: Tensor, position_ids: Tensor, temperature: Tensor) -> Tensor:
        return self.network(pixel_values + 0 * position_ids) / temperature


@pytest.mark.parametrize("layers", ["last", "all"])
def test_named_inputs_may_lack_a_row_for_each_item(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lam.models.layers.AT_ONCE", 1)  # every item alone
    batches = make_batches()
    width = batches[0][0].shape[1]
    shared = {"position_ids": torch.arange(width)[None], "temperature": torch.tensor(1.0)}
    plain = [{"pixel_values": inputs, "labels": labels} for inputs, labels in batches]
    named = [{**shared, **batch} for batch in plain]
    options = Laplace(margin=0.7, layers=layers)
    encoder = lam.fit(WithPositions(), named, options, progress=False)
    expected = lam.fit(ByName(), plain, options, progress=False)
    assert torch.equal(encoder.embed(named).kappa, expected.embed(plain).kappa)
    assert encoder.trained_on == expected.trained_on
    with pytest.warns(UserWarning, match="known training items"):
        encoder.learn_ambiguity(named)


@pytest.mark.parametrize("key", ["labels", "label"])
def test_one_named_input_goes_to_a_network_that_calls_it_otherwise(key: str) -> None:
    batches = make_batches()
    named = [{"pixel_values": inputs, key: labels} for inputs, labels in batches]
    encoder = lam.fit(make_network(), named, margin=0.7, progress=False)
    assert torch.equal(encoder.embed(named).kappa, encoder.embed(batches).kappa)


def test_arrays_are_read_as_tensors() -> None:
    batches = make_batches()
    arrays = [(inputs.numpy(), labels.numpy()) for inputs, labels in batches]
    encoder = lam.fit(make_network(), arrays, margin=0.7, progress=False)
    expected = encoder.embed(batches[0][0]).kappa
    for batch in (arrays[0][0], arrays[0], {"x": arrays[0][0]}, arrays[0][0].astype(">f4")):
        assert torch.equal(encoder.embed(batch).kappa, expected)
    backwards = [tuple(array[::-1].copy()[::-1] for array in batch) for batch in arrays]  # in memory, not in order
    assert torch.equal(
        lam.fit(make_network(), backwards, margin=0.7, progress=False).embed(backwards[0]).kappa, expected
    )


def test_arrays_that_cannot_be_written_are_read_without_a_warning(tmp_path: Path) -> None:
    batch = make_batches(1)[0]
    for place, tensor in enumerate(batch):
        np.save(tmp_path / f"{place}.npy", tensor.numpy())
    mapped = tuple(np.load(tmp_path / f"{place}.npy", mmap_mode="r") for place in range(2))
    encoder = lam.fit(make_network(), mapped, margin=0.7, progress=False)
    expected = lam.fit(make_network(), batch, margin=0.7, progress=False)
    assert torch.equal(encoder.embed(mapped[0]).kappa, expected.embed(batch[0]).kappa)


@pytest.mark.filterwarnings("ignore:the held-out items contain")
def test_arrays_by_column_are_read_as_those_by_row() -> None:
    inputs, labels = make_batches(1, N=64)[0]
    by_column = inputs.T.contiguous().T
    encoder, expected = (
        lam.fit(make_network(), [(each, labels)], margin=0.7, progress=False) for each in (by_column, inputs)
    )
    assert encoder.trained_on == expected.trained_on
    encoder.learn_ambiguity([(by_column, labels)])
    expected.learn_ambiguity([(inputs, labels)])
    assert torch.equal(encoder.embed(by_column).kappa, expected.embed(inputs).kappa)


@pytest.mark.parametrize("first", [0, 100])
def test_labels_of_pandas_are_read_by_position(first: int) -> None:
    pandas = pytest.importorskip("pandas")
    batches = make_batches()
    index = list(range(first, first + len(batches[0][1])))[::-1]
    series = [(inputs, pandas.Series(labels.numpy(), index=index)) for inputs, labels in batches]
    expected = lam.fit(make_network(), batches, margin=0.7, progress=False).embed(batches)
    encoder = lam.fit(make_network(), series, margin=0.7, progress=False)
    assert torch.equal(encoder.embed(batches).kappa, expected.kappa)


def test_a_batch_may_have_its_labels_in_a_list() -> None:
    inputs, labels = make_batches(1)[0]
    expected = lam.fit(make_network(), (inputs, labels), margin=0.7, progress=False)
    held_out = make_batches(2)[1]
    for batch in ((inputs, labels.tolist()), (inputs.numpy(), labels.tolist()), ({"input": inputs}, labels.tolist())):
        encoder = lam.fit(make_network(), batch, margin=0.7, progress=False)
        assert torch.equal(encoder.embed(inputs).kappa, expected.embed(inputs).kappa)
    measured = lam.evaluate(expected, (held_out[0], held_out[1].tolist())).metrics
    assert measured == lam.evaluate(expected, held_out).metrics


def test_integers_that_an_array_holds_as_objects_are_labels() -> None:
    batches = make_batches()
    objects = [(inputs, labels.numpy().astype(object)) for inputs, labels in batches]
    expected = lam.fit(make_network(), batches, margin=0.7, progress=False).embed(batches)
    encoder = lam.fit(make_network(), objects, margin=0.7, progress=False)
    assert torch.equal(encoder.embed(batches).kappa, expected.kappa)


def test_tables_of_pandas_are_inputs() -> None:
    pandas = pytest.importorskip("pandas")
    features, labels = torch.randn(40, 5), torch.arange(40) % 4
    encoder = lam.fit_features(features, labels, torch.eye(3, 5), margin=0.7)
    table, column = pandas.DataFrame(features.numpy(), index=range(40, 0, -1)), pandas.Series(labels.numpy())
    expected = encoder.embed(features).kappa
    rows = pandas.Series([*features.numpy()])
    for inputs in (table, [table], (table, column), [(table, column)], rows, rows.to_numpy()):
        torch.testing.assert_close(encoder.embed(inputs).kappa, expected)  # a table lies by column in memory
    for held_out in ((table, column), (features, column), [(table, column)]):
        assert lam.evaluate(encoder, held_out).metrics == lam.evaluate(encoder, (features, labels)).metrics


def test_a_table_with_names_is_refused_with_what_to_do() -> None:
    pandas = pytest.importorskip("pandas")
    encoder = lam.fit_features(torch.randn(40, 5), torch.arange(40) % 4, torch.eye(3, 5), margin=0.7)
    for inputs in (pandas.DataFrame(torch.randn(4, 5).numpy()).assign(name="a"), pandas.Series(["a", "b"])):
        with pytest.raises(ValueError, match="inputs must.*array of type.*columns"):
            encoder.embed(inputs)


@pytest.mark.parametrize("inputs", [[[0.0] * 5] * 3, {"features": torch.zeros(3, 5)}])
def test_features_that_are_no_tensor_are_refused_with_what_to_give(inputs: Any) -> None:
    encoder = lam.fit_features(torch.randn(40, 5), torch.arange(40) % 4, torch.eye(3, 5), margin=0.7)
    with pytest.raises(ValueError, match=r"features.*torch.as_tensor\(features\)"):
        encoder.embed(inputs)


def test_names_and_kinds_that_no_network_takes_are_refused_with_what_to_write() -> None:
    encoder = lam.fit(make_network(), make_batches(), margin=0.7, progress=False)
    inputs = make_batches()[0][0]
    with pytest.raises(ValueError, match="pixel_values, mask"):
        encoder.embed({"pixel_values": inputs, "mask": inputs})
    with pytest.raises(ValueError, match=r"got Image: give preprocessing\(image\)\[None\]"):
        encoder.embed(Image.new("RGB", (8, 8)))
    with pytest.raises(ValueError, match=r"missing .* 'mask'\): .*dictionary"):
        lam.fit(Masked(), make_batches(), margin=0.7, progress=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("head", ["identity", "train"])
def test_a_network_of_torchscript_has_a_layer_added(head: str) -> None:
    batches = make_batches()
    scripted = scripted_network(batches[0][0])
    encoder = lam.fit(scripted, batches, lam.Laplace(margin=0.7, head=head), progress=False)
    expected = lam.fit(make_network(), batches, lam.Laplace(margin=0.7, head=head), progress=False)
    torch.testing.assert_close(encoder.embed(batches).mean, expected.embed(batches).mean)
    by_default = lam.fit(scripted, batches, margin=0.7, progress=False)
    assert head == "train" or torch.equal(by_default.embed(batches).kappa, encoder.embed(batches).kappa)


def test_a_network_of_torchscript_is_saved_and_read(tmp_path: Path) -> None:
    batches = make_batches()
    scripted = scripted_network(batches[0][0])
    encoder = lam.fit(scripted, batches, lam.Laplace(margin=0.7, head="identity"), progress=False)
    encoder.save(tmp_path / "encoder")
    again = lam.load(tmp_path / "encoder", scripted)
    assert torch.equal(again.embed(batches).kappa, encoder.embed(batches).kappa)


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 8, 8, 1)])
def test_images_of_other_axes_are_refused_with_what_to_write(shape: tuple[int, ...]) -> None:
    encoder = DeterministicEncoder(models.build("convnet8", dimension=3), "head")
    with pytest.raises(ValueError, match=r"inputs.*inputs\[None\].*inputs.permute\(0, 3, 1, 2\)"):
        encoder.embed(torch.zeros(shape))


@pytest.mark.parametrize("kind", ["array", "table"])
def test_stored_features_may_be_arrays_or_tables(kind: str) -> None:
    def as_given(values: Tensor) -> Any:
        if kind == "array":
            return values.numpy()
        return pytest.importorskip("pandas").DataFrame(values.numpy()).squeeze()

    parts = torch.randn(40, 5), torch.arange(40) % 4, torch.randn(3, 5), torch.randn(3)
    of_arrays, of_tensors = (lam.fit_features(*given, margin=0.7) for given in (map(as_given, parts), parts))
    for name, expected in of_tensors.tensors().items():
        torch.testing.assert_close(of_arrays.tensors()[name], expected, rtol=1e-4, atol=1e-6)

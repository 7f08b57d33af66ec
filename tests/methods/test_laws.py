"""Laws of every registered method and its encoder."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lam
from lam.encoders.base import Encoder
from lam.encoders.load import ENCODERS
from lam.methods import METHODS, Trained
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings
from tests.methods import small_data as small

DATA = small.images()
NEW = small.images(12, seed=3).images


@cache
def trained(method: str) -> Trained:
    """One training for all laws, whose tests do not change it."""
    return small.quick(method).train(small.network(dropout=0.1), DATA, small.training(seed=4))


def same(one: Embeddings, other: Embeddings) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("mean", "kappa", "variance"))


def in_evaluation(encoder: Encoder) -> bool:
    network = encoder.network
    assert isinstance(network, nn.Module)
    return not any(module.training for module in network.modules() if not isinstance(module, nn.ModuleList))


def law_training_gives_the_class_that_the_method_names(method: str, folder: Path) -> None:
    encoder, histories = trained(method)
    assert type(encoder) is METHODS[method].encoder is ENCODERS[encoder.kind]
    assert METHODS[method].name == method
    assert histories
    assert all(history.losses for history in histories.values())
    assert in_evaluation(encoder)
    assert encoder.preprocessing == DATA.preprocessing


def law_embeddings_are_directions_with_a_kappa_in_its_range(method: str, folder: Path) -> None:
    encoder = trained(method).encoder
    embeddings = encoder.embed(NEW)
    assert embeddings.mean.shape == (12, encoder.dimension)
    assert {values.shape for values in (embeddings.kappa, embeddings.resultant, embeddings.variance)} == {(12,)}
    torch.testing.assert_close(embeddings.mean.norm(dim=1), torch.ones(12))
    assert ((embeddings.kappa >= 0.99 * KAPPA_RANGE[0]) & (embeddings.kappa <= 1.01 * KAPPA_RANGE[1])).all()
    assert ((embeddings.resultant >= 0) & (embeddings.resultant <= 1)).all()
    assert (embeddings.variance >= 0).all()
    assert encoder.has_kappa or (embeddings.kappa == KAPPA_RANGE[1]).all()
    assert 2 <= encoder.kappa_dimension <= encoder.dimension


def law_an_embedding_is_the_same_alone_and_in_any_batch(method: str, folder: Path) -> None:
    encoder = trained(method).encoder
    whole, parts = (encoder.predict(x, n_samples=5, joint=True) for x in (NEW, [NEW[:1], NEW[:0], NEW[1:5], NEW[5:]]))
    torch.testing.assert_close(parts.embeddings.mean, whole.embeddings.mean)
    torch.testing.assert_close(parts.embeddings.kappa, whole.embeddings.kappa, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.features, whole.features)
    if encoder.has_kappa:
        torch.testing.assert_close(parts.samples, whole.samples, rtol=1e-5, atol=1e-5)


def law_the_same_seed_gives_the_same_to_the_bit_and_draws_nothing_from_torch(method: str, folder: Path) -> None:
    state = torch.get_rng_state()
    again = small.quick(method).train(small.network(dropout=0.1), DATA, small.training(seed=4)).encoder
    assert same(again.embed(NEW), trained(method).encoder.embed(NEW))
    assert torch.equal(torch.get_rng_state(), state)


def law_joint_samples_are_unit_vectors_or_none_where_there_is_no_kappa(method: str, folder: Path) -> None:
    encoder, state = trained(method).encoder, torch.get_rng_state()
    prediction, again = (encoder.predict(NEW, n_samples=3, joint=True) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(prediction.embeddings, again.embeddings)
    assert same(prediction.embeddings, encoder.embed(NEW, n_samples=3))
    assert len(prediction.features) == 12
    assert (prediction.samples is not None) == encoder.has_kappa
    if prediction.samples is not None:
        assert torch.equal(prediction.samples, again.samples)
        torch.testing.assert_close(prediction.samples.norm(dim=-1), torch.ones(prediction.samples.shape[:2]))
        assert prediction.samples.shape[1:] == (12, encoder.kappa_dimension)
    assert encoder.predict(NEW[:2]).samples is None


def law_an_encoder_is_read_back_to_the_bit(method: str, folder: Path) -> None:
    encoder = trained(method).encoder
    encoder.save(folder)
    loaded = lam.load(folder)
    assert type(loaded) is type(encoder)
    assert same(loaded.embed(NEW), encoder.embed(NEW))
    names = ("kind", "head", "relation", "preprocessing", "ood_score", "n_samples", "dimension", "kappa_dimension")
    assert [getattr(loaded, name) for name in names] == [getattr(encoder, name) for name in names]
    assert loaded.settings() == encoder.settings()
    loaded.to("cpu").save(folder / "again")
    assert same(lam.load(folder / "again").embed(NEW), encoder.embed(NEW))


def law_an_encoder_is_trained_and_read_back_whatever_the_default_type(method: str, folder: Path) -> None:
    encoder, network = trained(method).encoder, small.network(dropout=0.1)
    encoder.save(folder)
    torch.set_default_dtype(torch.float64)
    try:
        assert same(lam.load(folder).embed(NEW), encoder.embed(NEW))
        again = small.quick(method).train(network, DATA, small.training(seed=4)).encoder
        assert again.embed(NEW).mean.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def law_an_encoder_is_evaluated(method: str, folder: Path) -> None:
    encoder = trained(method).encoder
    metrics = lam.evaluate(encoder, small.batches(small.images(20, seed=3)), [small.outside()], n_samples=4).metrics
    assert all(0 <= metrics[name] <= 1 for name in ("recall@1", "map@5", "auroc", "auroc_variance"))
    assert (metrics["ece"] is not None) == encoder.has_kappa
    assert 0 <= (metrics["ece"] or 0) <= 1


def law_what_cannot_be_embedded_is_refused(method: str, folder: Path) -> None:
    encoder = trained(method).encoder
    for empty in ([], NEW[:0]):
        for embed in (encoder.embed, encoder.predict):
            with pytest.raises(ValueError, match="inputs.*embed"):
                embed(empty)
    with pytest.raises(ValueError, match="n_samples.*2.*1"):
        encoder.embed(NEW, n_samples=1)
    with pytest.raises(ValueError, match="features.*nan.*item 5"):
        encoder.embed([NEW[:2], NEW.index_fill(0, torch.tensor([3]), torch.nan)])


def law_a_trained_network_is_where_it_begins_or_is_refused_before_any_work(method: str, folder: Path) -> None:
    quick, network = small.quick(method), small.network(dropout=0.1)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    try:
        quick.check_start(pretrained=True)
    except ValueError:
        with pytest.raises(ValueError, match="cannot start from"):
            quick.train(network, DATA, small.training(pretrained=True, folder=folder))
        assert not any(folder.iterdir())
        assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
        return
    encoder, histories = quick.train(network, DATA, small.training(pretrained=True))
    assert in_evaluation(encoder)
    if "network" not in histories:
        assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def law_a_resumed_training_ends_as_an_uninterrupted_one(method: str, folder: Path) -> None:
    def train(**options: object) -> Embeddings:
        network = small.network(dropout=0.1)
        return small.quick(method).train(network, DATA, small.training(epochs=2, **options)).encoder.embed(NEW)

    epochs = []

    def stop(network: nn.Module) -> float:
        epochs.append(network)
        if len(epochs) == 2:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        train(folder=folder, validate=stop)
    assert same(train(folder=folder, validate=lambda _: 0.0), train(validate=lambda _: 0.0))


LAWS: list[Callable[[str, Path], None]] = [law for name, law in globals().items() if name.startswith("law_")]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("law_"))
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_the_law(law: Callable[[str, Path], None], method: str, tmp_path: Path) -> None:
    law(method, tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_no_items_and_one_dimension_are_refused_before_any_work(method: str, as_in_production: None) -> None:
    training = small.training(another=lambda _: nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Dropout(0.1)))
    with pytest.raises(ValueError, match="dataset.*2.*0"):
        small.quick(method).train(small.network(dropout=0.1), TensorDataset(NEW[:0], DATA.labels[:0]), training)
    with pytest.raises(ValueError, match="2 outputs.*1"):
        small.quick(method).train(training.another(0), DATA, training)


@pytest.mark.parametrize("method", METHODS)
def test_a_network_inside_wrappers_is_trained_as_it_is(method: str) -> None:
    network = small.network(dropout=0.1)
    wrapped = nn.DataParallel(torch.compile(network, backend="eager"))
    encoder = small.quick(method).train(wrapped, DATA, small.training(seed=4)).encoder
    assert same(encoder.embed(NEW), trained(method).encoder.embed(NEW))
    assert in_evaluation(encoder)
    member = encoder.network[0] if isinstance(encoder.network, nn.ModuleList) else encoder.network
    assert next(member.parameters()) is next(network.parameters())

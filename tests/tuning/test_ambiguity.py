"""κ_a and p_known: the loss against a double loop and SciPy, learning, and an encoder's embeddings."""

import math
import warnings
from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lam
from lam import fit, fit_features
from lam.encoders.batches import item_hashes
from lam.encoders.deterministic import DeterministicEncoder
from lam.models.kappa_head import KappaHead
from lam.pairs.relation import Relation
from lam.pairs.relevance import LabelRelevance, relevance_of
from lam.tuning import typicality
from lam.tuning.ambiguity import (
    FORMS,
    SEVERAL,
    UNSEEN,
    Ambiguity,
    NeighbourConcentration,
    _ambiguous_below,
    learn,
    match_cosines,
    match_loss,
)
from lam.vmf import KAPPA_RANGE, Embeddings, VonMisesFisher, bessel_ratio, kappa_from_resultant
from tests.encoders.small import WIDE


def items(n: int = 240, dimension: int = 6, *, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, with an item's spread around the centre of its class in the last column; and labels."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.eye(classes, dimension)
    labels, spread = torch.arange(n) % classes, torch.rand(n, 1, generator=generator)
    features = centres[labels] + 1.5 * spread * torch.randn(n, dimension, generator=generator)
    return torch.cat([features, 4 * spread], 1), labels


def encoder_of(features: torch.Tensor, labels: torch.Tensor) -> lam.BayesianEncoder:
    weight = torch.eye(features.shape[1])[:-1]  # all but the column that tells how ambiguous an item is
    return fit_features(features, labels, weight, margin=0.7)


@pytest.fixture(scope="module")
def learned() -> lam.BayesianEncoder:
    train, labels = items(seed=1)
    encoder = encoder_of(train, labels)
    held_out, its_labels = items(seed=2)
    encoder.learn_ambiguity([(held_out, its_labels)])
    return encoder


@pytest.mark.parametrize("dimension", [2, 3, 16, 512, 4096])
def test_loss_is_the_mean_of_log_densities_over_pairs(dimension: int) -> None:
    generator = torch.Generator().manual_seed(0)
    unit = F.normalize(torch.randn(8, dimension, generator=generator, dtype=torch.float64))
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    kappa = dimension * torch.rand(8, generator=generator, dtype=torch.float64) + 0.1
    terms = []
    for a in range(8):
        order, k = dimension / 2 - 1, float(kappa[a])
        with mpmath.workdps(40):
            log_bessel = float(mpmath.log(mpmath.besseli(order, k)))
        log_normalizer = order * math.log(k) - dimension / 2 * math.log(2 * math.pi) - log_bessel
        for b in range(8):
            if a != b and labels[a] == labels[b]:
                terms.append(log_normalizer + k * float(unit[a] @ unit[b]))
    cosine, count = match_cosines(unit, LabelRelevance(labels))
    actual = match_loss(kappa, cosine, count, dimension)
    torch.testing.assert_close(float(actual), -sum(terms) / len(terms), rtol=1e-9, atol=1e-9)


def test_kappa_a_is_that_of_the_weighted_cosine_to_known_items() -> None:
    generator = torch.Generator().manual_seed(0)
    known, mean = (F.normalize(torch.randn(n, 4, generator=generator, dtype=torch.float64)) for n in (9, 5))
    head = NeighbourConcentration(known, *torch.tensor([6.0, 0.1, 0.8], dtype=torch.float64))
    expected = []
    for n in mean.tolist():
        cosines = [sum(map(math.prod, zip(n, other, strict=True))) for other in known.tolist()]
        weights = [math.exp(6 * cosine) for cosine in cosines]
        weighted = sum(map(math.prod, zip(weights, cosines, strict=True))) / sum(weights)
        expected.append(kappa_from_resultant(torch.tensor(0.1 + 0.8 * weighted, dtype=torch.float64), 4))
    torch.testing.assert_close(head(mean, mean), torch.stack(expected), rtol=1e-9, atol=1e-9)


def test_many_items_at_once_get_what_each_gets_alone() -> None:
    known = F.normalize(torch.randn(30, 4, generator=torch.Generator().manual_seed(1)).double())
    head = NeighbourConcentration(known, *torch.tensor([6.0, 0.1, 0.8], dtype=torch.float64))
    many = known.repeat(40, 1)
    torch.testing.assert_close(head(many, many)[-30:], head(known, known))


def test_an_item_between_two_classes_is_ambiguous() -> None:
    labels, angle = torch.arange(120) % 2, torch.randn(120, generator=torch.Generator().manual_seed(2)) / 10 + torch.pi
    angle = angle + torch.pi / 2 * labels
    mean = torch.stack([angle.cos(), angle.sin()], 1)
    ambiguity = learn(mean, mean, LabelRelevance(labels))
    between = F.normalize(mean[labels == 0].mean(0) + mean[labels == 1].mean(0), dim=0)[None]
    centre = F.normalize(mean[labels == 0].mean(0), dim=0)[None]
    assert ambiguity.head(between, between) < ambiguity.head(mean, mean).quantile(0.05)
    assert ambiguity.head(centre, centre) > ambiguity.head(mean, mean).quantile(0.3)


@pytest.mark.parametrize(("wrong", "is_said"), [([0, 1, 2, 3, 4], True), ([0, 20, 40, 60, 80], False), ([], False)])
def test_several_things_are_said_only_where_held_out_answers_show_it(wrong: list[int], is_said: bool) -> None:
    correct = torch.ones(100, dtype=torch.bool)
    correct[wrong] = False
    limit = _ambiguous_below(torch.arange(1.0, 101.0).double(), correct)
    assert limit == pytest.approx(10.9 if is_said else 0)


@pytest.mark.parametrize("dimension", [2, 3, 64, 4096])
def test_gradient_of_the_loss_is_that_of_finite_differences(dimension: int) -> None:
    kappa = torch.tensor([0.5, 3.0, 40.0], dtype=torch.float64, requires_grad=True)
    cosine, count = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0]).double()
    assert torch.autograd.gradcheck(lambda k: match_loss(k, cosine, count, dimension), kappa)


def test_the_best_constant_kappa_has_the_resultant_length_of_the_matches() -> None:
    cosine, count = torch.tensor([0.2, 0.6, 0.7]).double(), torch.tensor([1.0, 1.0, 2.0]).double()
    best = kappa_from_resultant((cosine * count).sum() / count.sum(), 5)
    around = torch.stack([best * factor for factor in (0.9, 1.0, 1.1)])[:, None].expand(-1, 3)
    losses = match_loss(around, cosine.expand(3, -1), count.expand(3, -1), 5)
    assert losses.argmin() == 1


def test_cosines_of_a_gallery_apart_and_of_places() -> None:
    unit = F.normalize(torch.randn(6, 3, generator=torch.Generator().manual_seed(0))).double()
    is_query = torch.tensor([True, True, False, False, False, False])
    cosine, count = match_cosines(unit, LabelRelevance(torch.tensor([0, 1, 0, 0, 1, 2]), is_query))
    torch.testing.assert_close(cosine, torch.stack([(unit[0] @ (unit[2] + unit[3])) / 2, unit[1] @ unit[4]]))
    assert count.tolist() == [2, 1]
    places = relevance_of(Relation(positive_within=10.0), torch.tensor([[0.0, 0.0], [0.0, 5.0], [90.0, 0.0]]))
    cosine, count = match_cosines(unit[:3], places)
    assert count.tolist() == [1, 1, 0]
    torch.testing.assert_close(cosine, torch.stack([unit[0] @ unit[1], unit[0] @ unit[1], unit.new_tensor(0.0)]))


def test_ambiguous_items_get_a_small_kappa_and_strangers_a_small_p_known(learned: lam.BayesianEncoder) -> None:
    features, _ = items(seed=3)
    embeddings = learned.embed(features)
    spread = features[:, -1]
    assert embeddings.kappa_aleatoric is not None
    assert embeddings.p_known is not None
    assert embeddings.kappa_aleatoric[spread < 1].median() > 3 * embeddings.kappa_aleatoric[spread > 3].median()
    assert embeddings.p_known.median() > 0.9
    strangers = learned.embed(torch.full((1, 7), -9.0))
    assert strangers.p_known is not None
    assert strangers.p_known < 0.1
    assert strangers.kappa < embeddings.kappa.min()
    assert learned.ambiguity is not None
    assert learned.ambiguity.doubts(strangers) == [UNSEEN]
    least = embeddings[embeddings.kappa_aleatoric.argmin()[None]]
    assert learned.ambiguity.doubts(least)[0] in (SEVERAL, UNSEEN)
    most = embeddings[embeddings.kappa.argmax()[None]]
    assert learned.ambiguity.doubts(most) == [""]


def at_odds(known: Any) -> Any:
    """A probability at odds of 100 to 1, by Bayes's rule."""
    return 100 * known / (100 * known + 1 - known)


def resultant_of(embeddings: Embeddings) -> torch.Tensor:
    """A_D(κ_a) A_D(κ_e) times p_known at odds of 100 to 1."""
    assert embeddings.p_known is not None
    assert embeddings.kappa_aleatoric is not None
    assert embeddings.kappa_epistemic is not None
    kappas = (embeddings.kappa_aleatoric, embeddings.kappa_epistemic)
    ratios = [bessel_ratio(embeddings.dimension, kappa.double()) for kappa in kappas]
    return at_odds(embeddings.p_known.double()) * ratios[0] * ratios[1]


def test_kappa_combines_its_parts(learned: lam.BayesianEncoder) -> None:
    embeddings = learned.embed(items(seed=4)[0])
    resultant = resultant_of(embeddings)
    torch.testing.assert_close(embeddings.resultant.double(), resultant, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bessel_ratio(6, embeddings.kappa.double()), resultant, rtol=1e-5, atol=1e-6)
    assert (embeddings.kappa >= KAPPA_RANGE[0]).all()


def test_resultant_is_the_mean_cosine_of_drawn_matches(learned: lam.BayesianEncoder) -> None:
    """A true direction is drawn around the embedding, and a match around this direction, or anywhere."""
    n, generator = 200_000, torch.Generator().manual_seed(0)
    wide = Embeddings(*(torch.tensor(value) for value in ([[1.0, 0, 0, 0, 0, 0]], [4.0], [0.5], [0.0])))
    assert learned.ambiguity is not None
    longer = items(seed=4)[0][:1] * torch.linspace(1, 9, 200)[:, None]
    doubtful = (at_odds(learned.ambiguity.typicality(longer)) - 0.5).abs().argmin()
    embeddings = learned.ambiguity(longer[doubtful][None], wide)
    assert embeddings.p_known is not None
    assert 0.3 < at_odds(float(embeddings.p_known)) < 0.7
    assert embeddings.kappa_aleatoric is not None
    centres = VonMisesFisher(wide.mean[0].double(), wide.kappa[0].double()).sample((n,), generator=generator)
    matches = VonMisesFisher(centres, embeddings.kappa_aleatoric.double().expand(n)).sample((), generator=generator)
    is_known = torch.rand(n, generator=generator) < at_odds(embeddings.p_known)
    elsewhere = F.normalize(torch.randn(n, 6, generator=generator, dtype=torch.float64))
    cosines = torch.where(is_known[:, None], matches, elsewhere)[:, 0]
    assert float(embeddings.resultant) == pytest.approx(float(cosines.mean()), abs=4 / n**0.5)


@pytest.mark.parametrize("kappa", [1e3, 1e6])
def test_a_large_kappa_keeps_its_digits(learned: lam.BayesianEncoder, kappa: float) -> None:
    assert learned.ambiguity is not None
    alike = NeighbourConcentration(torch.eye(6)[:1], *(torch.tensor(value) for value in (1.0, 1 - 1e-7, 0.0)))
    sure = replace(learned.ambiguity, head=alike)
    wide = Embeddings(torch.eye(6)[:1], *(torch.tensor([value], dtype=torch.float64) for value in (kappa, 1.0, 0.0)))
    typical = items(seed=4)[0].mean(0, keepdim=True)
    embeddings = sure(typical, wide)
    assert embeddings.p_known is not None
    assert embeddings.kappa_aleatoric is not None
    with mpmath.workdps(40):
        one, other = (mpmath.mpf(float(value)) for value in (embeddings.kappa_aleatoric, kappa))
        ratio = math.prod(mpmath.besseli(3, value) / mpmath.besseli(2, value) for value in (one, other))
        expected = at_odds(mpmath.mpf(float(embeddings.p_known))) * ratio
        found = mpmath.besseli(3, float(embeddings.kappa)) / mpmath.besseli(2, float(embeddings.kappa))
        assert abs((1 - found) / (1 - expected) - 1) < 1e-9


@pytest.mark.long
def test_directions_variance_and_the_posterior_stay_to_the_bit() -> None:
    train, labels = items(seed=1)
    encoder = encoder_of(train, labels)
    queries = items(seed=5)[0]
    before = encoder.embed(queries)
    assert not before.has_parts
    assert before.kappa_epistemic is None
    encoder.learn_ambiguity([items(seed=2)])
    after = encoder.embed(queries)
    assert after.kappa_epistemic is not None
    assert torch.equal(after.kappa_epistemic, before.kappa)
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(after.variance, before.variance)
    joint = encoder.predict(queries, joint=True)
    assert torch.equal(joint.embeddings.kappa, after.kappa)


def test_an_item_alone_is_what_it_is_in_any_batch(learned: lam.BayesianEncoder) -> None:
    queries = items(seed=5)[0]
    whole, parts = learned.embed(queries), learned.embed(list(queries[:40].split(1)))
    for name in ("kappa", "kappa_epistemic", "kappa_aleatoric", "p_known"):
        torch.testing.assert_close(getattr(whole, name)[:40], getattr(parts, name), rtol=1e-4, atol=1e-6)


def test_a_large_batch_is_recognised_in_parts(learned: lam.BayesianEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert learned.ambiguity is not None
    rows: list[int] = []
    monkeypatch.setattr(typicality, "nearest_distance", lambda own, others: rows.append(len(own[1])) or own[1].log())
    assert len(learned.ambiguity.typicality.scores(items(1300)[0])) == 1300
    assert rows == [512, 512, 276]


@pytest.mark.long
def test_same_seed_same_numbers_and_saved_and_loaded(learned: lam.BayesianEncoder, tmp_path) -> None:
    held_out, labels = items(seed=2)
    again = encoder_of(*items(seed=1))
    again.learn_ambiguity([(held_out, labels)])
    learned.save(tmp_path / "encoder")
    loaded = lam.load(tmp_path / "encoder")
    queries = items(seed=5)[0]
    first = learned.embed(queries)
    for other in (again.embed(queries), loaded.embed(queries)):
        for name in ("kappa", "kappa_epistemic", "kappa_aleatoric", "p_known"):
            assert torch.equal(getattr(first, name), getattr(other, name))


def test_rows_are_taken_joined_and_moved_with_their_parts(learned: lam.BayesianEncoder) -> None:
    embeddings = learned.embed(items(seed=5)[0])
    halves = Embeddings.concatenate([embeddings[:100], embeddings[100:]]).to("cpu")
    assert halves.p_known is not None
    assert embeddings.p_known is not None
    assert torch.equal(halves.p_known, embeddings.p_known)
    assert embeddings.kappa_aleatoric is not None
    assert halves[torch.tensor([3])].kappa_aleatoric == embeddings.kappa_aleatoric[3]


@pytest.mark.long
def test_training_items_are_recognised() -> None:
    train, labels = items(seed=1)
    encoder = encoder_of(train, labels)
    with pytest.warns(UserWarning, match="known training items"):
        encoder.learn_ambiguity([(train, labels)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.learn_ambiguity([items(seed=2)], reference=[train])


def test_the_reference_has_directions_of_as_many_samples_as_the_held_out_items() -> None:
    train, labels = items(seed=1)
    encoder = encoder_of(train, labels)
    encoder.mean = "sampled"
    encoder.learn_ambiguity([items(seed=2)], reference=[train])
    ambiguity = encoder.ambiguity
    assert ambiguity is not None
    assert isinstance(ambiguity.head, NeighbourConcentration)
    torch.testing.assert_close(ambiguity.head.known[-len(train) :], encoder.embed(train).mean)


def test_padding_does_not_change_what_a_text_is_recognised_by() -> None:
    short = {"ids": torch.tensor([[5, 6, 7]]), "mask": torch.tensor([[1, 1, 1]])}
    padded = {"ids": torch.tensor([[5, 6, 7, 0]]), "mask": torch.tensor([[1, 1, 1, 0]])}
    assert item_hashes(short) == item_hashes(padded)


@pytest.mark.parametrize("count", [4, 40])
def test_tensors_without_a_row_for_each_item_do_not_change_what_an_item_is_recognised_by(count: int) -> None:
    own, labels = {"ids": torch.arange(1, 31).view(10, 3)}, torch.arange(10)
    shared = {"a": torch.arange(3)[None], "position_ids": torch.arange(count), "temperature": torch.tensor(2.0)}
    assert item_hashes({**own, **shared}, labels) == item_hashes(own)
    assert len(item_hashes(own)) == 10


@pytest.mark.long
@pytest.mark.parametrize("dimension", [2, 512, 4096])
def test_any_dimension(dimension: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    centres = F.normalize(torch.randn(2, dimension, generator=generator))
    mean = F.normalize(centres[labels] + 0.5 / dimension**0.5 * torch.randn(40, dimension, generator=generator))
    ambiguity = learn(mean, mean, LabelRelevance(labels))
    one = torch.ones(40)
    embeddings = ambiguity(mean, Embeddings(mean, one, one, one))
    cosine, _ = match_cosines(mean, LabelRelevance(labels))
    assert embeddings.kappa_aleatoric is not None
    length = bessel_ratio(dimension, embeddings.kappa_aleatoric.double())
    torch.testing.assert_close(length.mean(), cosine.mean(), rtol=0.1, atol=0.02)


@pytest.mark.long
def test_features_that_are_all_alike_in_shape_are_known() -> None:
    labels = torch.arange(60) % 3
    unit = F.normalize(items(60, classes=3, seed=1)[0])
    ambiguity = learn(unit, unit, LabelRelevance(labels))
    assert ambiguity.typicality(unit).median() > 0.9


@pytest.mark.long
def test_an_encoder_without_uncertainty_gets_a_kappa(tmp_path) -> None:
    network = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 3))
    encoder = DeterministicEncoder(network, "2")
    assert not encoder.has_kappa
    encoder.learn_ambiguity([items(seed=2)])
    assert encoder.has_kappa
    assert not DeterministicEncoder.has_kappa
    assert encoder.embed(items(seed=3)[0]).kappa.unique().numel() > 100
    encoder.save(tmp_path / "encoder")
    assert lam.load(tmp_path / "encoder", network).has_kappa


@pytest.mark.parametrize("form", FORMS)
def test_a_head_that_was_trained_gives_kappa_a_and_p_known_alone_is_learned(form, learned, tmp_path) -> None:
    head = KappaHead(7, 16, start=5.0, form=form, seed=3)
    train, labels = items(seed=1)
    encoder = encoder_of(train, labels)
    encoder.learn_ambiguity([items(seed=2)], kappa_head=head)
    features, _ = items(seed=3)
    embeddings, other = encoder.embed(features), learned.embed(features)
    assert embeddings.p_known is not None
    assert embeddings.kappa_aleatoric is not None
    assert other.p_known is not None
    torch.testing.assert_close(embeddings.kappa_aleatoric, head(features).detach(), rtol=1e-5, atol=1e-5)
    assert ((embeddings.p_known > 0.5) == (other.p_known > 0.5)).double().mean() > 0.9
    torch.testing.assert_close(embeddings.resultant.double(), resultant_of(embeddings), rtol=1e-5, atol=1e-6)
    encoder.save(tmp_path)
    loaded = lam.load(tmp_path).embed(features)
    assert all(torch.equal(getattr(loaded, part), values) for part, values in embeddings.parts().items())
    assert torch.equal(encoder.to("cpu").embed(features).kappa, loaded.kappa)
    with pytest.raises(ValueError, match="the kappa_head takes 5 features, got 7"):
        encoder.learn_ambiguity([items(seed=2)], kappa_head=KappaHead(5))


@pytest.mark.long
def test_exported_with_the_encoder(tmp_path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, WIDE))
    features, labels = items(seed=1)
    encoder = fit(network, [(features, labels)], margin=0.7, progress=False)
    encoder.learn_ambiguity([items(seed=2)])
    encoder.export(tmp_path / "encoder.pt2", features[:2])
    program = torch.export.load(tmp_path / "encoder.pt2").module()
    queries = items(seed=5)[0][:5]
    expected = encoder.embed(queries)
    _, mean, kappa, variance, epistemic, aleatoric, known = program(queries)
    for name, actual in (("mean", mean), ("kappa", kappa), ("variance", variance), ("kappa_epistemic", epistemic)):
        torch.testing.assert_close(actual, getattr(expected, name), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aleatoric, expected.kappa_aleatoric, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(known, expected.p_known, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63 - 1])
def test_any_seed_of_64_bits(seed: int) -> None:
    mean = F.normalize(items()[0])
    assert learn(mean, mean, LabelRelevance(items()[1]), seed=seed).typicality(mean).isfinite().all()


@pytest.mark.usefixtures("as_in_production")
def test_an_encoder_in_place_of_its_kappa_head_is_refused(learned: lam.BayesianEncoder) -> None:
    mean = F.normalize(items()[0])
    head: Any = learned
    with pytest.raises(ValueError, match=r"KappaHead, got BayesianEncoder: give encoder.kappa_head"):
        learn(mean, mean, LabelRelevance(items()[1]), kappa_head=head)


@pytest.mark.long
def test_what_cannot_be_learned_from_is_refused() -> None:
    encoder = encoder_of(*items(seed=1))
    features, labels = items(seed=2)
    with pytest.raises(ValueError, match="20 items.*match.*0"):
        encoder.learn_ambiguity([(features, torch.arange(len(features)))])
    with pytest.raises(ValueError, match="20 items.*match.*10"):
        encoder.learn_ambiguity([(features[:10], labels[:10] % 2)])
    with pytest.raises(ValueError, match="inputs with labels"):
        encoder.learn_ambiguity([features])
    broken = features.clone()
    broken[3, 0] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        encoder.learn_ambiguity([(broken, labels)])
    assert encoder.ambiguity is None
    ambiguity, plain = learn(features, features, LabelRelevance(labels)), encoder.embed(features)
    with pytest.raises(ValueError, match="p_known and kappa_aleatoric are missing"):
        ambiguity.doubts(plain)
    with pytest.raises(ValueError, match="dimensions.*embeddings.*2"):
        learn(features, features[:, :1], LabelRelevance(labels))


def test_tensors_make_it_again(learned: lam.BayesianEncoder) -> None:
    assert learned.ambiguity is not None
    tensors = learned.ambiguity.tensors()
    again = Ambiguity.restored(tensors).tensors()
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())

"""The choice of pairs: against pytorch-metric-learning for labels, against three loops for places."""

from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import ContrastiveLoss
from pytorch_metric_learning.miners import BatchEasyHardMiner, PairMarginMiner, TripletMarginMiner
from torch import Tensor

from lam import losses
from lam.hessians import ContrastiveCurvature, Diagonal
from lam.hessians.accumulate import LastLayerAccumulator
from lam.pairs.mining import Mining
from lam.pairs.pairs import Pairs
from lam.pairs.relation import Relation
from tests.helpers import contrastive_ggn

MARGIN = 0.4
KINDS = ["easy", "semihard", "hard", "violating"]
LABELS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 0])


def points(N: int = 12, D: int = 3, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(N, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def choose(mining: Mining, embeddings: Tensor, labels: Tensor = LABELS) -> Pairs:
    pairs = Pairs.by_label(labels)
    return mining.choose(embeddings, pairs, labels, margin=MARGIN, generator=generator())


def triplets(kind: str, embeddings: Tensor, pairs: Pairs) -> list[tuple[int, int, int]]:
    """Every triplet of a kind, by three loops."""
    of_kind = {
        "easy": lambda gap: gap > MARGIN,
        "semihard": lambda gap: 0 < gap <= MARGIN,
        "hard": lambda gap: gap <= 0,
        "violating": lambda gap: gap <= MARGIN,
    }[kind]
    items = range(len(embeddings))
    distance = [[float((a - b).norm()) for b in embeddings] for a in embeddings]
    return [
        (a, p, n)
        for a in items
        for p in items
        for n in items
        if pairs.positive[a, p] and pairs.negative[a, n] and of_kind(distance[a][n] - distance[a][p])
    ]


def counted(found: list[tuple[int, int, int]], size: int) -> tuple[Tensor, Tensor]:
    weights = torch.zeros(2, size, size)
    for a, p, n in found:
        for kind, other in enumerate((p, n)):
            weights[kind, a, other] += 0.5
            weights[kind, other, a] += 0.5
    return weights[0], weights[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_names_are_the_triplets_of_pytorch_metric_learning(kind: str, seed: int) -> None:
    embeddings = points(seed=seed)
    named = choose(Mining(kind), embeddings)
    theirs = "all" if kind == "violating" else kind
    mined = choose(Mining(TripletMarginMiner(margin=MARGIN, type_of_triplets=theirs)), embeddings)
    assert torch.equal(named.positive.float(), mined.positive)
    assert torch.equal(named.negative.float(), mined.negative)
    assert named.positive.sum() == named.negative.sum() > 0
    assert (named.n_positives, named.n_negatives) == (mined.n_positives, mined.n_negatives)


@pytest.mark.parametrize("kind", KINDS)
def test_names_choose_among_places(kind: str) -> None:
    positions = torch.tensor([[0.0], [4.0], [9.0], [15.0], [40.0], [44.0], [300.0]])
    pairs = Pairs.by_distance(positions, 10.0, 25.0)
    embeddings = points(7)
    chosen = Mining(kind).choose(embeddings, pairs, positions, margin=MARGIN, generator=generator())
    positive, negative = counted(triplets(kind, embeddings, pairs), 7)
    assert positive.any()
    torch.testing.assert_close(chosen.positive.float(), positive)
    torch.testing.assert_close(chosen.negative.float(), negative)
    assert not chosen.negative[0, 2]


@pytest.mark.parametrize(
    "mining",
    [
        *(Mining(kind) for kind in KINDS),
        *(Mining("violating", 3), Mining("all", 3), Mining(TripletMarginMiner(margin=0.5))),
    ],
    ids=str,
)
def test_labels_are_kept_through_mining(mining: Mining) -> None:
    chosen = choose(mining, points())
    assert chosen.labels is not None
    assert torch.equal(chosen.labels, LABELS)
    assert (chosen.positive != Pairs.by_label(LABELS).positive).any()


@pytest.mark.parametrize(
    "miner",
    [
        BatchEasyHardMiner(),
        BatchEasyHardMiner(pos_strategy="hard", neg_strategy="hard"),
        PairMarginMiner(pos_margin=0.2, neg_margin=0.8),
        TripletMarginMiner(margin=0.2, distance=CosineSimilarity()),
    ],
)
def test_the_loss_is_that_of_pytorch_metric_learning_with_its_miner(miner: Any) -> None:
    embeddings = points()
    expected = ContrastiveLoss(pos_margin=0, neg_margin=MARGIN)(embeddings, LABELS, miner(embeddings, LABELS))
    loss = losses.build("pml", margin=MARGIN)
    torch.testing.assert_close(loss(embeddings, choose(Mining(miner), embeddings)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["contrastive", "squared", "pml", "log_posterior"])
def test_what_each_loss_divides_by(kind: str, name: str) -> None:
    embeddings, everything = points(), Pairs.by_label(LABELS)
    of_kind = triplets(kind, embeddings, everything)
    positive = torch.stack([(embeddings[a] - embeddings[p]).norm() for a, p, _ in of_kind])
    negative = torch.stack([(embeddings[a] - embeddings[n]).norm() for a, _, n in of_kind])
    inside = negative[negative < MARGIN]
    apart = [
        len({frozenset(pair) for pair in chosen}) for chosen in ([t[:2] for t in of_kind], [t[::2] for t in of_kind])
    ]
    share = [2 * apart[0] / everything.n_positives, 2 * apart[1] / everything.n_negatives]
    expected = {
        "contrastive": positive.square().mean() + mean((MARGIN - inside).square()),
        "squared": positive.square().mean() + mean(MARGIN**2 - inside.square()),
        "pml": positive.mean() + mean(MARGIN - inside),
        "log_posterior": (
            share[0] * positive.square().mean() + share[1] * (MARGIN**2 - negative.square()).relu().mean()
        )
        / 2,
    }[name]
    value = losses.build(name, margin=MARGIN)(embeddings, choose(Mining(kind), embeddings))
    rounded = 0.5 / 30  # n⁺ and n⁻ are rounded; here they are some tens
    torch.testing.assert_close(value, expected, rtol=rounded if name == "log_posterior" else 1e-9, atol=1e-12)


def mean(values: Tensor) -> Tensor:
    return values.sum() / max(1, len(values))


def test_pairs_that_hold_all_curvature_give_that_of_all_pairs() -> None:
    features, weight = points(12, 5), torch.randn(3, 5, generator=generator(1), dtype=torch.float64)
    embeddings = F.normalize(features @ weight.T)
    chosen = choose(Mining(PairMarginMiner(pos_margin=-1, neg_margin=MARGIN)), embeddings)
    everything = Pairs.by_label(LABELS)
    assert 0 < chosen.negative.sum() < everything.negative.sum()
    ggn = [contrastive_ggn(features, weight, None, pairs, margin=MARGIN).h for pairs in (chosen, everything)]
    torch.testing.assert_close(*ggn)


def test_a_pair_named_often_weighs_more_among_the_chosen_and_not_more_in_all() -> None:
    def repeated(times: int) -> Mining:
        return Mining(lambda _, labels: tuple(t.repeat(times) for t in BatchEasyHardMiner()(points(), labels)))

    once, thrice = choose(repeated(1), points()), choose(repeated(3), points())
    assert torch.equal(3 * once.positive, thrice.positive)
    assert abs(3 * once.n_positives - thrice.n_positives) <= 2  # both are rounded
    assert abs(3 * once.n_negatives - thrice.n_negatives) <= 2


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_triplets_are_drawn_from_those_of_a_kind(kind: Any) -> None:
    """Triplets are equally likely, none is drawn twice, and each gives a positive and a negative pair."""
    embeddings, everything = points(8), Pairs.by_label(LABELS[:8])
    found, size = triplets(kind, embeddings, everything), 8
    count = 2 * len(found) // 3
    draws, total = generator(), torch.zeros(2, size, size, dtype=torch.float64)
    for _ in range(times := 15_000 // count):
        drawn = Mining(kind, max_pairs=count).choose(embeddings, everything, None, margin=MARGIN, generator=draws)
        assert drawn.positive.sum() == drawn.negative.sum() == count
        total += torch.stack([drawn.positive, drawn.negative]) / times
    chance = count / len(found)
    for seen, expected in zip(total, counted(found, size), strict=True):
        assert ((seen - chance * expected).abs() <= 5 * (chance * expected / times).sqrt() + 1e-12).all()
    whole = Mining(kind).choose(embeddings, everything, None, margin=MARGIN, generator=draws)
    for mine, of_all in (("n_positives", whole.n_positives), ("n_negatives", whole.n_negatives)):
        assert abs(getattr(drawn, mine) - of_all * chance) <= 0.5
    every = Mining(kind, max_pairs=len(found)).choose(embeddings, everything, None, margin=MARGIN, generator=draws)
    assert torch.equal(every.negative, whole.negative)
    but_one = Mining(kind, max_pairs=len(found) - 1)
    left = but_one.choose(embeddings, everything, None, margin=MARGIN, generator=draws)
    assert whole.negative.sum() - left.negative.sum() == 1
    assert (whole.negative >= left.negative).all()


@pytest.mark.parametrize("miner", ["all", TripletMarginMiner(margin=MARGIN)])
def test_pairs_are_drawn_from_those_chosen(miner: Any) -> None:
    labels, embeddings = torch.arange(40) % 4, points(40)
    everything = choose(Mining(miner), embeddings, labels)
    drawn = choose(Mining(miner, max_pairs=30), embeddings, labels)
    for weights, there in ((drawn.positive, everything.positive), (drawn.negative, everything.negative)):
        assert torch.equal(weights, weights.T)
        assert int(weights.count_nonzero()) == 2 * 30
        assert torch.equal(weights, there * (weights > 0))
    if miner == "all":
        assert (drawn.n_positives, drawn.n_negatives) == (60, 60)
    pairs = Pairs.by_label(labels)
    other = Mining(miner, 30).choose(embeddings, pairs, labels, margin=MARGIN, generator=generator(1))
    assert not torch.equal(other.negative, drawn.negative)
    assert torch.equal(choose(Mining(miner, max_pairs=30), embeddings, labels).negative, drawn.negative)
    assert torch.equal(choose(Mining(miner, max_pairs=10**6), embeddings, labels).negative, everything.negative)


@pytest.mark.long
def test_the_curvature_of_drawn_pairs_is_that_of_all_in_the_mean() -> None:
    features, weight = points(12, 5), torch.randn(3, 5, generator=generator(1), dtype=torch.float64)
    pairs, draws, embeddings = Pairs.by_label(LABELS), generator(), F.normalize(features @ weight.T)
    mined = [Mining("all", 16).choose(embeddings, pairs, LABELS, margin=1.0, generator=draws) for _ in range(800)]
    h = torch.stack([contrastive_ggn(features, weight, None, drawn, margin=1.0).h for drawn in mined])
    standard_error = h.std(0) / len(mined) ** 0.5
    assert ((h.mean(0) - contrastive_ggn(features, weight, None, pairs, margin=1.0).h).abs() < 5 * standard_error).all()


def test_no_triplet_of_the_kind_leaves_no_pair_and_no_curvature() -> None:
    apart = F.one_hot(torch.arange(6) // 2).double()
    pairs = choose(Mining("hard", max_pairs=2), apart, torch.arange(6) // 2)
    assert not pairs.positive.any()
    assert not pairs.negative.any()
    assert not contrastive_ggn(apart, torch.eye(3, dtype=torch.float64), None, pairs, margin=1.0).h.any()
    for name in ("contrastive", "squared", "pml", "log_posterior"):
        value = losses.build(name, margin=1.0)(apart.requires_grad_(), pairs)
        value.backward()
        assert value == 0


@pytest.mark.parametrize("labels", [torch.zeros(4, dtype=torch.long), torch.arange(4), torch.tensor([3])])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_without_a_triplet(labels: Tensor, kind: str) -> None:
    pairs = choose(Mining(kind), points(len(labels)), labels)
    assert not pairs.positive.any()
    assert not pairs.negative.any()


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_that_are_not_finite_are_left_to_the_loss(kind: str) -> None:
    embeddings = points()
    embeddings[3] = torch.nan
    for max_pairs in (None, 1, 20):
        pairs = choose(Mining(kind, max_pairs), embeddings)
        assert not pairs.paired[3]
        assert losses.build(margin=MARGIN)(embeddings, pairs).isnan()


def test_half_precision_and_gradients_do_not_matter() -> None:
    embeddings = points().bfloat16()
    expected = choose(Mining("semihard"), embeddings.float())
    chosen = choose(Mining("semihard"), embeddings.requires_grad_())
    assert torch.equal(chosen.negative, expected.negative)
    assert not chosen.negative.requires_grad


def test_accumulated_curvature_is_over_the_chosen_pairs_and_forgets_them() -> None:
    batches = [(points(12, 5, seed), LABELS) for seed in range(3)]
    weight, bias = torch.randn(3, 5, generator=generator(1), dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    mining = Mining("semihard", max_pairs=6)
    relation = Relation(miner="semihard", max_pairs=6, triplet_margin=MARGIN)
    empty = Diagonal.zeros(weight, ContrastiveCurvature(MARGIN), has_bias=True)
    summing = LastLayerAccumulator(empty=empty, relation=relation, seed=3, weight=weight, bias=bias)
    total, n_items = summing.accumulate(batches)
    expected = torch.zeros_like(total.sums)
    for features, labels in batches:
        embeddings = F.normalize(F.linear(features, weight, bias))
        pairs = mining.choose(embeddings, Pairs.by_label(labels), labels, margin=MARGIN, generator=generator(3))
        expected += contrastive_ggn(features, weight, bias, pairs, margin=MARGIN).sums
    torch.testing.assert_close(total.sums, expected)
    assert n_items == 36
    rest = total - summing.accumulate(batches[1:2])[0]
    kept = summing.accumulate(batches[::2])[0]
    torch.testing.assert_close(rest.h, kept.h, rtol=1e-12, atol=1e-15)


def test_settings_tell_miners_apart() -> None:
    minings = [
        Mining("hard"),
        Mining("hard", max_pairs=3),
        Mining(TripletMarginMiner(margin=0.1)),
        Mining(TripletMarginMiner(margin=0.2)),
        Mining(TripletMarginMiner(margin=0.2, distance=CosineSimilarity())),
        Mining(BatchEasyHardMiner()),
        Mining(lambda embeddings, labels: (labels, labels, labels)),
    ]
    settings = [repr(mining.settings) for mining in minings]
    assert len(set(settings)) == len(settings)
    used = TripletMarginMiner(margin=0.1)
    used(points(), LABELS)
    assert repr(Mining(used).settings) == settings[2]


def test_bad_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in production
    with pytest.raises(ValueError, match="miner.*all, violating, easy, semihard, hard.*'best'"):
        Mining("best")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_pairs.*1.*0"):
        Mining(max_pairs=0)
    with pytest.raises(ValueError, match=r"max_pairs.*2\.5"):
        Mining(max_pairs=2.5)  # pyright: ignore[reportArgumentType]
    positions = torch.rand(12, 2)
    for targets in (positions, None):
        with pytest.raises(ValueError, match="needs labels, .*: choose by name, all, violating, easy"):
            Mining(BatchEasyHardMiner()).choose(
                points(), Pairs.by_distance(positions, 0.5), targets, margin=1.0, generator=generator()
            )
    with pytest.raises(ValueError, match="pairs.*5.*pairs.*12"):
        choose(Mining("hard"), points(5))
    with pytest.raises(ValueError, match="margin.*0.0"):
        Mining("hard").choose(points(), Pairs.by_label(LABELS), LABELS, margin=0.0, generator=generator())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"negative_beyond": 3.0}, "negative_beyond needs positive_within"),
        ({"angle_within": 3.0}, "angle_within needs positive_within"),
        ({"triplet_margin": 0.0}, "triplet_margin must be positive, got 0.0"),
        ({"scope": "dataset", "miner": "hard"}, "pairs.*mined within"),
    ],
)
def test_a_relation_that_contradicts_itself_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Relation(**settings)


def test_triplets_need_a_margin_and_all_pairs_none() -> None:
    embeddings, labels = F.normalize(points(12, 5, 0)), LABELS
    pairs = Pairs.by_label(labels)
    assert Mining("all").choose(embeddings, pairs, labels, margin=None, generator=generator(0)) is pairs
    with pytest.raises(ValueError, match="hard triplets.*margin"):
        Mining("hard").choose(embeddings, pairs, labels, margin=None, generator=generator(0))

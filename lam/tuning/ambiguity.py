"""`Ambiguity`: κ_a, the concentration of an item's matches, and p_known, the probability that it is in-distribution.

The posterior gives κ_e: how well the data determine an embedding. Known items nearby, or a trained head, give κ_a: how
closely an item's matches lie around the item. One κ combines κ_e, κ_a and p_known. With probability q, the true
direction is von Mises-Fisher around the embedding with κ_e, and a match is von Mises-Fisher around the true direction
with κ_a. Otherwise, a match is uniform on the sphere. Mean resultant lengths A_D(κ) multiply, so the mean resultant
length of a match around the embedding is R = q A_D(κ_a) A_D(κ_e), and κ = A_D⁻¹(R). q is p_known with prior odds of 100
to 1 instead of 1 to 1: q/(1 − q) = 100 p_known/(1 − p_known). Therefore q lowers κ only far from all known items.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lam.models.kappa_head import Form, KappaHead, kappa_of
from lam.pairs.relevance import Relevance
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.uncertainty import ausc
from lam.tuning.typicality import TensorRecord, Typicality, learn_typicality, p_known
from lam.utils.autocast import without_autocast
from lam.utils.blocks import row_blocks
from lam.utils.checks import check_at_least, check_finite
from lam.vmf.bessel import bessel_ratio, bessel_ratio_complement, kappa_from_resultant, log_normalizer
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

FOLDS = 5
LEAST_ITEMS = 20  # least number of items with a match that `learn` needs
Doubt = Literal["", "I have not seen such a thing", "this could be several things"]
UNSEEN: Doubt = "I have not seen such a thing"
SEVERAL: Doubt = "this could be several things"

FORMS: tuple[Form, ...] = get_args(Form)
ODDS = 100.0  # prior odds of a known item in the combined κ; p_known itself has prior odds of 1
SHARPNESS = tuple(2.0**exponent for exponent in range(1, 10))
"""Candidates for s in the neighbour weights exp(s cos)."""
_AMBIGUOUS, _LEVEL, _DRAWS = 0.1, 0.05, 50
_LARGEST_COSINE = 1 - 1e-9
_BLOCK, _BLOCK_ELEMENTS = 512, 1 << 24


@dataclass(frozen=True)
class NeighbourConcentration(TensorRecord):
    """κ_a of a direction n, from a weighted mean c of its cosines n·n_j to known directions n_j.

    κ_a = A_D⁻¹(a + b c) with c = Σ_j w_j n·n_j, weights w_j ∝ exp(s n·n_j), and A_D as in the module's docstring. c is
    small between two classes and far from all known items. a + b c estimates the mean cosine of n to its matches.

    Source: Nadaraya (1964) and Watson (1964) for the mean over neighbours.

    Attributes:
        known: (O, D) directions n_j.
        sharpness: () s.
        offset, slope: () a and b.
    """

    known: Float[Tensor, "O D"]
    sharpness: Float[Tensor, ""]
    offset: Float[Tensor, ""]
    slope: Float[Tensor, ""]

    def __call__(self, features: Float[Tensor, "N P"], mean: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """κ_a from the directions `mean`, float64, within `KAPPA_RANGE`."""
        if not torch.compiler.is_exporting() and len(mean) > _BLOCK:  # blocks limit the memory of cosines
            parts = zip(features.split(_BLOCK), mean.split(_BLOCK), strict=True)
            return torch.cat([self(*part) for part in parts])
        cosines = (mean.to(self.known) @ self.known.T).double()
        return _concentration(self.offset + self.slope * _neighbour_cosine(cosines, self.sharpness), mean.shape[1])


@dataclass(frozen=True)
class TrainedHead(TensorRecord):
    """κ_a from features, by the weights of a trained `lam.models.kappa_head.KappaHead`.

    Attributes:
        hidden_weight, hidden_bias: (U, P) and (U,).
        output_weight, output_bias: (U,) and ().
        form: () index in `FORMS` of the function that maps the head's output to κ.
    """

    hidden_weight: Float[Tensor, "U P"]
    hidden_bias: Float[Tensor, " U"]
    output_weight: Float[Tensor, " U"]
    output_bias: Float[Tensor, ""]
    form: Int[Tensor, ""]

    def __call__(self, features: Float[Tensor, "N P"], mean: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """κ_a from the features, float64, within `KAPPA_RANGE`."""
        hidden = (features.to(self.hidden_weight) @ self.hidden_weight.T + self.hidden_bias).relu()
        raw = hidden @ self.output_weight + self.output_bias
        by_form = torch.stack([kappa_of(raw, form) for form in FORMS])
        return by_form.index_select(0, self.form[None])[0].clamp(*KAPPA_RANGE)

    @staticmethod
    def of(head: KappaHead) -> "TrainedHead":
        """A copy of a head's weights, in float64."""
        hidden, output = head.first, head.last
        tensors = (hidden.weight, hidden.bias, output.weight[0], output.bias[0])
        form = torch.tensor(FORMS.index(head.form), device=hidden.weight.device)
        return TrainedHead(*(tensor.detach().double().clone() for tensor in tensors), form)  # pyright: ignore[reportCallIssue]

    def kappa_head(self) -> KappaHead:
        """A head with these weights, in float32."""
        n_hidden, n_features = self.hidden_weight.shape
        head = KappaHead(n_features, n_hidden, form=FORMS[int(self.form)])
        tensors = (self.hidden_weight, self.hidden_bias, self.output_weight[None], self.output_bias[None])
        head.load_state_dict(dict(zip(head.state_dict(), tensors, strict=True)))
        return head


@dataclass(frozen=True)
class Ambiguity:
    """κ_a and p_known, learned from held-out items.

    Attributes:
        head: computes κ_a.
        typicality: computes p_known.
        ambiguous_below: () an item with a lower κ_a is ambiguous. The limit is the 0.1 quantile of κ_a over held-out
            items, or 0 if wrong first hits are not significantly more frequent below this quantile.
    """

    head: NeighbourConcentration | TrainedHead
    typicality: Typicality
    ambiguous_below: Float[Tensor, ""]

    @without_autocast()
    def __call__(
        self, features: Float[Tensor, "N P"], embeddings: Embeddings, *, epistemic_dimension: int | None = None
    ) -> Embeddings:
        """The embeddings with the combined κ and its three parts; the old κ becomes `kappa_epistemic`.

        The old κ is defined on the sphere of `epistemic_dimension` dimensions, by default the embeddings' dimension.
        """
        least, most = KAPPA_RANGE
        dimension, dtype = embeddings.dimension, embeddings.kappa.dtype
        own = dimension if epistemic_dimension is None else epistemic_dimension
        aleatoric = self.head(features, embeddings.mean)
        epistemic, known = embeddings.kappa.to(aleatoric), self.typicality(features)
        cosine, distance = bessel_ratio(dimension, aleatoric), bessel_ratio_complement(dimension, aleatoric)
        known_at_odds = ODDS * known / (1 + (ODDS - 1) * known)
        resultant = known_at_odds * cosine * bessel_ratio(own, epistemic)
        # 1 − R from complements, because subtraction would lose the digits of a large κ
        distance = distance + cosine * bessel_ratio_complement(own, epistemic)
        rest = (1 - known) / (1 + (ODDS - 1) * known) + known_at_odds * distance
        kappa = kappa_from_resultant(resultant, dimension, one_minus_resultant=rest, max_kappa=most).clamp(min=least)
        return replace(
            embeddings,
            kappa=kappa.to(dtype),
            resultant=resultant.to(dtype),
            kappa_epistemic=embeddings.kappa,
            kappa_aleatoric=aleatoric.to(dtype),
            p_known=known.to(dtype),
        )

    def doubts(self, embeddings: Embeddings) -> list[Doubt]:
        """Why each item is uncertain, in words; empty for a known, unambiguous item.

        Raises:
            ValueError: for embeddings without `p_known` and `kappa_aleatoric`.
        """
        if embeddings.p_known is None or embeddings.kappa_aleatoric is None:
            raise ValueError("p_known and kappa_aleatoric are missing: embed with an encoder that learned ambiguity")
        several = (embeddings.kappa_aleatoric < self.ambiguous_below.to(embeddings.kappa_aleatoric)).tolist()
        unseen = (embeddings.p_known < 0.5).tolist()
        return [UNSEEN if new else SEVERAL if many else "" for new, many in zip(unseen, several, strict=True)]

    def to(self, device: torch.device | str) -> "Ambiguity":
        return Ambiguity(self.head.to(device), self.typicality.to(device), self.ambiguous_below.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        named = {f"head.{name}": tensor for name, tensor in self.head.tensors().items()}
        named |= {f"typicality.{name}": tensor for name, tensor in self.typicality.tensors().items()}
        return {**named, "ambiguous_below": self.ambiguous_below}

    @staticmethod
    def restored(tensors: Mapping[str, Tensor]) -> "Ambiguity":
        """Rebuild the record from the result of `tensors`."""
        parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for path, tensor in tensors.items():
            part, _, name = path.partition(".")
            parts[part][name] = tensor
        kind = TrainedHead if "form" in parts["head"] else NeighbourConcentration
        typicality = Typicality.restored(parts["typicality"])
        return Ambiguity(kind.restored(parts["head"]), typicality, tensors["ambiguous_below"])


def match_loss(
    kappa: Float[Tensor, "*B N"], cosine: Float[Tensor, "*B N"], count: Float[Tensor, "*B N"], dimension: int
) -> Float[Tensor, "*B"]:
    """Minus the mean log density of matches: the mean of −log C_D(κ_a) − κ_a n·m over pairs of an item and a match.

    n and m are their directions, and C_D normalises the von Mises-Fisher density. The loss is a proper scoring rule.

    Source: Li et al. (2021), "Spherical confidence learning for face recognition", equation 8, with matches instead of
    class centres.

    Args:
        kappa: κ_a ≥ 0 of each item.
        cosine: mean cosine of each item to its matches.
        count: number of matches of each item, not all 0.
        dimension: D ≥ 2.

    Example:
        >>> match_loss(torch.tensor([0.0, 5.0]), torch.tensor([0.1, 0.9]), torch.ones(2), 3)
        tensor(1.6297)
    """
    density = log_normalizer(dimension, kappa, scaled=True) - kappa * (1 - cosine)
    return -(density * count).sum(-1) / count.sum(-1)


def match_cosines(mean: Float[Tensor, "N D"], relevance: Relevance) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
    """For each query, the mean cosine to its matches (0 without a match) and the number of matches, float64."""
    unit = F.normalize(mean.double())
    gallery = unit[relevance.candidates.to(unit.device)]
    cosines, counts = [], []
    for block in row_blocks(len(relevance.queries), len(gallery), elements=_BLOCK_ELEMENTS):
        part = torch.arange(block.start, block.stop)
        matches = relevance.of_rows(part).to(unit.device)
        own = unit[relevance.queries[part].to(unit.device)]
        total, count = (own * (matches.double() @ gallery)).sum(1), matches.sum(1).double()
        if relevance.gallery is None:  # then `of_rows` counts each query as its own match
            total, count = total - own.square().sum(1), count - 1
        cosines.append(total / count.clamp(min=1))
        counts.append(count)
    return torch.cat(cosines), torch.cat(counts)


def check_enough(relevance: Relevance) -> None:
    """Raise a `ValueError` for data with fewer than 20 items that have a match."""
    n_matched = int((relevance.count() > 0).sum())
    if n_matched < LEAST_ITEMS:
        raise ValueError(
            f"ambiguity needs at least {LEAST_ITEMS} items with a match, got {n_matched}: give more items that share a "
            "label, or places near each other"
        )


@without_autocast()
def learn(
    features: Float[Tensor, "N P"],
    mean: Float[Tensor, "N D"],
    relevance: Relevance,
    *,
    reference: tuple[Float[Tensor, "O P"], Float[Tensor, "O D"]] | None = None,
    kappa_head: KappaHead | None = None,
    seed: int = 0,
) -> Ambiguity:
    """Learn κ_a and p_known from known items that the network was not trained on.

    In the fit of κ_a, no item is its own neighbour. The thresholds of p_known are quantiles of cross-validated scores.

    Args:
        features, mean: (N, P) features and (N, D) directions of the embeddings.
        relevance: which items match. The fit uses queries with a match; all other items only serve as known items.
        reference: features and directions of O further known items, which can also be neighbours.
        kappa_head: a trained head that computes κ_a; by default κ_a is learned from neighbours.
        seed: seed of the folds, the principal components and the bootstrap.

    Raises:
        ValueError: for features or directions that are not finite, fewer than 20 items with a match, D below 2, or a
            head for another number of features.

    Example:
        >>> from lam.pairs.relevance import LabelRelevance
        >>> labels = torch.arange(60) % 3
        >>> mean = F.normalize(torch.eye(3)[labels] + 0.3 * torch.randn(60, 3))
        >>> learn(mean, mean, LabelRelevance(labels)).typicality(mean).shape
        torch.Size([60])
    """
    check_at_least("the number of dimensions of the embeddings", mean.shape[1], 2)
    check_finite("features", features)
    check_finite("mean", mean)
    if not isinstance(kappa_head, KappaHead | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"kappa_head must be a lam.models.kappa_head.KappaHead, got {type(kappa_head).__name__}: give "
            "encoder.kappa_head of an encoder that was trained with one"
        )
    if kappa_head is not None and kappa_head.recipe["features"] != features.shape[1]:
        raise ValueError(
            f"the kappa_head takes {kappa_head.recipe['features']} features, got {features.shape[1]}: give the head of "
            "this network"
        )
    check_enough(relevance)
    cosine, count = match_cosines(mean, relevance)
    has_match = (count > 0).cpu()
    queries = relevance.queries[has_match].to(features.device)
    cosine, count = cosine[count > 0], count[count > 0]
    generator = torch.Generator().manual_seed(seed)
    folds = (torch.randperm(len(queries), generator=generator) % FOLDS).to(features.device)
    if kappa_head is None:
        head, kappa = _learn_concentration(mean, queries, cosine, count, None if reference is None else reference[1])
    else:
        head = TrainedHead.of(kappa_head).to(features.device)
        kappa = head(features[queries], mean[queries])
    apart = torch.ones(len(features), dtype=torch.bool, device=features.device)
    apart[queries] = False  # gallery items, and queries without a match, are known too
    known = torch.cat([features[apart], features[:0] if reference is None else reference[0].to(features)])
    typicalities, scores = learn_typicality(features[queries], folds, reference=known, seed=seed)
    unit = F.normalize(mean)
    hits, _ = rank(unit[relevance.queries], None if relevance.gallery is None else unit[relevance.gallery], k=1)
    correct = relevance.of_hits(hits)[:, 0][has_match]
    chosen = _widest(typicalities, scores, bessel_ratio(mean.shape[1], kappa), correct, generator)
    learned = Ambiguity(head, typicalities[chosen], _ambiguous_below(kappa, correct)).tensors()
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in learned.items()}
    return Ambiguity.restored(own)  # copies, because views of shared memory are hard to save and export


def _widest(
    typicalities: list[Typicality], scores: Tensor, resultant: Tensor, correct: Tensor, generator: torch.Generator
) -> int:
    """Index of the greatest width whose AUSC is within one standard error (paired bootstrap) of the best AUSC.

    A greater width makes p_known fall for more kinds of corruption; a smaller one leaves the order of items to κ_a.
    """
    doubts = [-(p_known(scores, each.thresholds, each.widths) * resultant).cpu() for each in typicalities]
    correct = correct.cpu()
    areas = torch.tensor([ausc(correct, doubt) for doubt in doubts])
    draws = torch.randint(len(correct), (_DRAWS, len(correct)), generator=generator)
    drawn = torch.tensor([[ausc(correct[draw], doubt[draw]) for doubt in doubts] for draw in draws])
    best = int(areas.argmax())
    errors = (drawn - drawn[:, best, None]).std(0)
    return int((areas >= areas[best] - errors).nonzero()[-1])


def _concentration(cosine: Tensor, dimension: int) -> Tensor:
    """A_D⁻¹ of a mean cosine, within `KAPPA_RANGE`; a cosine below 0 counts as 0."""
    least, most = KAPPA_RANGE
    return kappa_from_resultant(cosine.clamp(0, _LARGEST_COSINE), dimension, max_kappa=most).clamp(min=least)


def _neighbour_cosine(cosines: Float[Tensor, "N O"], sharpness: Tensor | float) -> Float[Tensor, " N"]:
    """Mean cosine to known items with weights ∝ exp(s cos); a cosine of −∞ excludes an item."""
    weights = (sharpness * cosines).softmax(1)
    return (weights * cosines.clamp(min=-1)).sum(1)


def _learn_concentration(
    mean: Tensor, queries: Tensor, cosine: Tensor, count: Tensor, reference: Tensor | None
) -> tuple[NeighbourConcentration, Tensor]:
    """The fitted function, and κ_a of each query from its neighbours, without the query itself.

    For each sharpness, weighted least squares fit a and b ≥ 0 to the mean cosines of matches. The sharpness with the
    least `match_loss` is chosen.
    """
    known = mean if reference is None else torch.cat([mean, reference.to(mean)])
    found = torch.empty(len(SHARPNESS), len(queries), dtype=torch.float64, device=mean.device)
    for rows in row_blocks(len(queries), len(known), elements=_BLOCK_ELEMENTS):
        cosines = (mean[queries[rows]] @ known.T).double()
        cosines.scatter_(1, queries[rows, None], -torch.inf)
        for place, sharpness in enumerate(SHARPNESS):
            found[place, rows] = _neighbour_cosine(cosines, sharpness)
    share = count / count.sum()
    centre, target = found @ share, cosine @ share
    apart = found - centre[:, None]
    spread = (apart.square() @ share).clamp(min=torch.finfo(torch.float64).tiny)
    slope = ((apart * (cosine - target)) @ share / spread).clamp(min=0)
    offset = target - slope * centre
    kappa = _concentration(offset[:, None] + slope[:, None] * found, mean.shape[1])
    best = int(match_loss(kappa, cosine.expand_as(kappa), count.expand_as(kappa), mean.shape[1]).argmin())
    sharpness = kappa.new_tensor(SHARPNESS[best])
    return NeighbourConcentration(known, sharpness, offset[best], slope[best]), kappa[best]


def _ambiguous_below(kappa: Tensor, correct: Tensor) -> Tensor:
    """`Ambiguity.ambiguous_below`: a quantile of κ, or 0 if wrong first hits are no more frequent below it."""
    from scipy.stats import hypergeom

    limit = kappa.quantile(_AMBIGUOUS)
    low = (kappa < limit).cpu()
    n, wrong, n_low, wrong_low = len(low), int((~correct).sum()), int(low.sum()), int((low & ~correct).sum())
    return limit if float(hypergeom.sf(wrong_low - 1, n, wrong, n_low)) <= _LEVEL else torch.zeros_like(limit)

"""`Ambiguity`: κ_a, the concentration of an item's matches, and p_known, the probability that its kind is known.

The posterior's κ_e says how well the data determine the weights for an item. κ_a says how closely its matches lie
around it; held-out matches or a trained head give it. One κ joins ambiguity and strangeness. An item follows its von
Mises-Fisher distribution with probability p_known, and otherwise the uniform one on the sphere. This mixture has the
mean resultant length R = p_known A_D(κ_a), and κ = A_D⁻¹(R).
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
from lam.tuning.tensors import TensorRecord
from lam.tuning.typicality import Components, Typicality, learn_typicality, p_known, shape_of
from lam.utils.autocast import without_autocast
from lam.utils.blocks import row_blocks
from lam.utils.checks import check_at_least, check_finite
from lam.vmf.bessel import bessel_ratio, bessel_ratio_complement, kappa_from_resultant, log_normalizer
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

FOLDS = 5
LEAST_ITEMS = 20
"""The least number of items with a match to learn from."""

Doubt = Literal["", "I have not seen such a thing", "this could be several things"]
UNSEEN: Doubt = "I have not seen such a thing"
SEVERAL: Doubt = "this could be several things"

FORMS: tuple[Form, ...] = get_args(Form)
_DIRECTIONS, _COMPONENTS, _HIDDEN = 16, 16, 128
_STEPS, _EVERY, _BATCH = 300, 10, 512
_RATE, _DECAY = 0.02, 0.01
_AMBIGUOUS, _DRAWS = 0.1, 50
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class ConcentrationHead(TensorRecord):
    """κ_a of features and direction: the geometric mean over M small networks with one hidden layer.

    Attributes:
        centre, axes: of the components of unit features.
        direction_centre, direction_axes: of the components of directions.
        input_mean, input_scale: (I,) over known items; the scale of constant inputs is infinite.
        hidden_weight, hidden_bias: (M, I, U) and (M, U).
        output_weight, output_bias: (M, U) and (M,), which give log κ_a.
    """

    centre: Float[Tensor, " P"]
    axes: Float[Tensor, "q P"]
    direction_centre: Float[Tensor, " D"]
    direction_axes: Float[Tensor, "J D"]
    input_mean: Float[Tensor, " I"]
    input_scale: Float[Tensor, " I"]
    hidden_weight: Float[Tensor, "M I U"]
    hidden_bias: Float[Tensor, "M U"]
    output_weight: Float[Tensor, "M U"]
    output_bias: Float[Tensor, " M"]

    def __call__(self, features: Float[Tensor, "N P"], mean: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """κ_a, float64, within the range of concentrations."""
        own = Components(self.centre, self.axes)
        directions = Components(self.direction_centre, self.direction_axes)
        inputs = (head_inputs(own, directions, features, mean) - self.input_mean) / self.input_scale
        weights = self.hidden_weight, self.hidden_bias, self.output_weight, self.output_bias
        return _clamp(log_kappa(inputs.expand(len(self.output_bias), -1, -1), *weights).mean(0))


@dataclass(frozen=True)
class TrainedHead(TensorRecord):
    """κ_a of features by a trained head, `lam.models.kappa_head.KappaHead`.

    Attributes:
        hidden_weight, hidden_bias: (U, P) and (U,).
        output_weight, output_bias: (U,) and ().
        form: () index in `FORMS` of the function from the head's output to κ.
    """

    hidden_weight: Float[Tensor, "U P"]
    hidden_bias: Float[Tensor, " U"]
    output_weight: Float[Tensor, " U"]
    output_bias: Float[Tensor, ""]
    form: Int[Tensor, ""]

    def __call__(self, features: Float[Tensor, "N P"], mean: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """κ_a of features alone, float64, within the range of concentrations."""
        hidden = (features.to(self.hidden_weight) @ self.hidden_weight.T + self.hidden_bias).relu()
        raw = hidden @ self.output_weight + self.output_bias
        by_form = torch.stack([kappa_of(raw, form) for form in FORMS])
        return by_form.index_select(0, self.form[None])[0].clamp(*KAPPA_RANGE)

    @staticmethod
    def of(head: KappaHead) -> "TrainedHead":
        """The record of a head, in float64."""
        hidden, output = head.first, head.last
        tensors = (hidden.weight, hidden.bias, output.weight[0], output.bias[0])
        form = torch.tensor(FORMS.index(head.form), device=hidden.weight.device)
        return TrainedHead(*(tensor.detach().double().clone() for tensor in tensors), form)  # pyright: ignore[reportCallIssue]

    def kappa_head(self) -> KappaHead:
        """The original head, in float32."""
        n_hidden, n_features = self.hidden_weight.shape
        head = KappaHead(n_features, n_hidden, form=FORMS[int(self.form)])
        tensors = (self.hidden_weight, self.hidden_bias, self.output_weight[None], self.output_bias[None])
        head.load_state_dict(dict(zip(head.state_dict(), tensors, strict=True)))
        return head


@dataclass(frozen=True)
class Ambiguity:
    """κ_a and p_known, learnt from held-out items.

    Attributes:
        head: κ_a, learnt from matches or by a trained head.
        typicality: p_known.
        ambiguous_below: () an item of smaller κ_a could be several things; 10 % of known items are.
    """

    head: ConcentrationHead | TrainedHead
    typicality: Typicality
    ambiguous_below: Float[Tensor, ""]

    @without_autocast()
    def __call__(self, features: Float[Tensor, "N P"], embeddings: Embeddings) -> Embeddings:
        """The embeddings with κ from κ_a and p_known, and with both parts; the old κ becomes `kappa_epistemic`."""
        least, most = KAPPA_RANGE
        dimension, dtype = embeddings.dimension, embeddings.kappa.dtype
        aleatoric = self.head(features, embeddings.mean)
        known = self.typicality(features)
        rest = 1 - known + known * bessel_ratio_complement(dimension, aleatoric)
        resultant = known * bessel_ratio(dimension, aleatoric)
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
        """The doubt about each item, in words; empty for a known, unambiguous item.

        Raises:
            ValueError: for embeddings without `p_known` and `kappa_aleatoric`.
        """
        if embeddings.p_known is None or embeddings.kappa_aleatoric is None:
            raise ValueError("p_known and kappa_aleatoric are missing: embed with an encoder that learnt its ambiguity")
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
        """The record of these tensors."""
        parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for path, tensor in tensors.items():
            part, _, name = path.partition(".")
            parts[part][name] = tensor
        kind = TrainedHead if "form" in parts["head"] else ConcentrationHead
        typicality = Typicality.restored(parts["typicality"])
        return Ambiguity(kind.restored(parts["head"]), typicality, tensors["ambiguous_below"])


def match_loss(
    kappa: Float[Tensor, "*B N"], cosine: Float[Tensor, "*B N"], count: Float[Tensor, "*B N"], dimension: int
) -> Float[Tensor, "*B"]:
    """−mean over positive pairs of [log C_D(κ_a) + κ_a n_a·n_p], a proper score of the matches' directions.

    Only the number and the mean cosine of an item's pairs enter.

    Source: Li et al. (2021), "Spherical confidence learning for face recognition", equation 8, for matches instead of
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
    """Mean cosine of each query to its matches in the gallery, 0 without a match, and their number; float64."""
    unit = F.normalize(mean.double())
    gallery = unit[relevance.candidates.to(unit.device)]
    cosines, counts = [], []
    for block in row_blocks(len(relevance.queries), len(gallery), elements=_BLOCK_ELEMENTS):
        part = torch.arange(block.start, block.stop)
        matches = relevance.of_rows(part).to(unit.device)
        own = unit[relevance.queries[part].to(unit.device)]
        total, count = (own * (matches.double() @ gallery)).sum(1), matches.sum(1).double()
        if relevance.gallery is None:  # each query is among its own matches here
            total, count = total - own.square().sum(1), count - 1
        cosines.append(total / count.clamp(min=1))
        counts.append(count)
    return torch.cat(cosines), torch.cat(counts)


def check_enough(relevance: Relevance) -> None:
    """Reject data with fewer than 20 items that have a match."""
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
    reference: Float[Tensor, "O P"] | None = None,
    kappa_head: KappaHead | None = None,
    seed: int = 0,
) -> Ambiguity:
    """Learn κ_a and p_known from known items that the network was not trained on, in five folds.

    Each of five small networks learns from four folds, and stops at the best likelihood of the matches in the fifth.
    p_known takes its thresholds from scores that were learnt on other folds.

    Args:
        features, mean: (N, P) features and (N, D) retrieved directions.
        relevance: which items match; its queries are learnt from.
        reference: (O, P) further known features, for the distance to the nearest.
        kappa_head: trained head that gives κ_a, which is then not learnt.
        seed: of the folds and the initial weights.

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
        head, kappa = _learn_head(features[queries], mean[queries], cosine, count, folds, generator)
    else:
        head = TrainedHead.of(kappa_head).to(features.device)
        kappa = head(features[queries], mean[queries])
    apart = torch.ones(len(features), dtype=torch.bool, device=features.device)
    apart[queries] = False  # the others are known too: gallery items, and queries without a match
    known = torch.cat([features[apart], features[:0] if reference is None else reference.to(features)])
    typicalities, scores = learn_typicality(features[queries], folds, reference=known, seed=seed)
    unit = F.normalize(mean)
    hits, _ = rank(unit[relevance.queries], None if relevance.gallery is None else unit[relevance.gallery], k=1)
    correct = relevance.of_hits(hits)[:, 0][has_match]
    chosen = _widest(typicalities, scores, bessel_ratio(mean.shape[1], kappa), correct, generator)
    learnt = Ambiguity(head, typicalities[chosen], kappa.quantile(_AMBIGUOUS)).tensors()
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in learnt.items()}
    return Ambiguity.restored(own)  # copies, as views of shared memory cannot be saved or exported well


def _widest(
    typicalities: list[Typicality], scores: Tensor, resultant: Tensor, correct: Tensor, generator: torch.Generator
) -> int:
    """Position of the widest p_known with an AUSC within one standard error of the best, by a paired bootstrap.

    A wide p_known drops under more kinds of corruption; a narrow one leaves the order of ordinary items to κ_a.
    """
    doubts = [-(p_known(scores, each.thresholds, each.widths) * resultant).cpu() for each in typicalities]
    correct = correct.cpu()
    areas = torch.tensor([ausc(correct, doubt) for doubt in doubts])
    draws = torch.randint(len(correct), (_DRAWS, len(correct)), generator=generator)
    drawn = torch.tensor([[ausc(correct[draw], doubt[draw]) for doubt in doubts] for draw in draws])
    best = int(areas.argmax())
    errors = (drawn - drawn[:, best, None]).std(0)
    return int((areas >= areas[best] - errors).nonzero()[-1])


def head_inputs(
    own: Components, directions: Components, features: Float[Tensor, "N P"], mean: Float[Tensor, "N D"]
) -> Float[Tensor, "N I"]:
    """Components of directions and of features, and the features' shape, float64, not standardised."""
    return torch.cat([directions(mean)[0].double(), own(features)[0].double(), shape_of(features)], 1)


def log_kappa(
    inputs: Float[Tensor, "M N I"],
    hidden_weight: Float[Tensor, "M I U"],
    hidden_bias: Float[Tensor, "M U"],
    output_weight: Float[Tensor, "M U"],
    output_bias: Float[Tensor, " M"],
) -> Float[Tensor, "M N"]:
    """log κ_a of N items by each of M networks."""
    hidden = (inputs @ hidden_weight + hidden_bias[:, None]).relu()
    return (hidden @ output_weight[..., None])[..., 0] + output_bias[:, None]


def _clamp(logs: Tensor) -> Tensor:
    return logs.exp().clamp(*KAPPA_RANGE)


def _learn_head(
    features: Tensor, mean: Tensor, cosine: Tensor, count: Tensor, folds: Tensor, generator: torch.Generator
) -> tuple[ConcentrationHead, Tensor]:
    """The head, and κ_a of each item by the network that did not learn from it."""
    seed = generator.initial_seed()
    own, directions = (
        Components.of(rows, most, seed=seed) for rows, most in ((features, _COMPONENTS), (mean, _DIRECTIONS))
    )
    inputs = head_inputs(own, directions, features, mean)
    centre, scale = inputs.mean(0), inputs.std(0)
    scale = torch.where(scale > 1e-9, scale, torch.inf)
    inputs = (inputs - centre) / scale
    weights = _train(inputs, cosine, count, folds, mean.shape[1], generator)
    head = ConcentrationHead(own.centre, own.axes, directions.centre, directions.axes, centre, scale, *weights)
    kappa = _clamp(log_kappa(inputs.expand(FOLDS, -1, -1), *weights))
    return head, kappa[folds, torch.arange(len(folds), device=folds.device)]


def _train(
    inputs: Tensor, cosine: Tensor, count: Tensor, folds: Tensor, dimension: int, generator: torch.Generator
) -> list[Tensor]:
    """Train five networks at once, each on the other folds, and keep the weights of least loss on its own fold.

    The initial weights give one κ to all items, so the result is never worse than that on its fold.
    """
    n_inputs, device = inputs.shape[1], inputs.device
    start = kappa_from_resultant((cosine * count).sum() / count.sum(), dimension, max_kappa=KAPPA_RANGE[1])
    hidden = torch.randn(FOLDS, n_inputs, _HIDDEN, generator=generator, dtype=torch.float64) / n_inputs**0.5
    zeros = torch.zeros(FOLDS, _HIDDEN, dtype=torch.float64)
    first = (hidden, zeros, zeros.clone(), start.cpu().clamp(min=1e-3).log().repeat(FOLDS))
    weights = [tensor.to(device).requires_grad_() for tensor in first]
    optimizer = torch.optim.AdamW(weights, _RATE, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    others = [(folds != fold).nonzero()[:, 0] for fold in range(FOLDS)]
    size = min(_BATCH, *map(len, others))
    own = torch.stack([folds == fold for fold in range(FOLDS)])
    best = torch.full((FOLDS,), torch.inf, dtype=torch.float64, device=device)
    kept = [weight.detach().clone() for weight in weights]
    for step in range(_STEPS + 1):
        if step % _EVERY == 0:
            with torch.no_grad():
                kappa = _clamp(log_kappa(inputs.expand(FOLDS, -1, -1), *weights))
                losses = match_loss(kappa, cosine.expand(FOLDS, -1), count * own, dimension)
            better = losses < best
            best = torch.where(better, losses, best)
            for kept_one, weight in zip(kept, weights, strict=True):
                kept_one[better] = weight.detach()[better]
        chosen = [part[torch.randperm(len(part), generator=generator)[:size].to(device)] for part in others]
        rows = torch.stack(chosen)
        kappa = _clamp(log_kappa(inputs[rows], *weights))
        loss = match_loss(kappa, cosine[rows], count[rows], dimension).sum() / (dimension - 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return kept

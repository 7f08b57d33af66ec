"""Scores and decisions on the features of `real.py`, over draws of known classes and strangers.

In each cell, some classes are known, some are held out for the calibration, and the rest are the strangers of the
test. Items of known classes are the gallery (and the training data of a head), calibration queries and test queries.
"""

import math
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from scipy.stats import binom
from torch import Tensor, nn

from lam.losses import SupCon
from lam.methods.fit import fit_features
from lam.methods.laplace import Laplace
from lam.pairs.pairs import Pairs
from lam.pairs.relevance import LabelRelevance
from lam.posteriors import Posterior
from lam.retrieval.decisions.abstention import ABSTAIN
from lam.retrieval.decisions.calibrate import CalibrationData, Choices, OtherQueries, calibrate
from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.retrieval.decisions.conformal import ConformalScores, least_rate
from lam.retrieval.decisions.flags import COMBINED
from lam.retrieval.decisions.probability import probability_bins
from lam.retrieval.index.exact import rank
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.open_set import Searches, search_open_set
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.uncertainty import ausc
from lam.retrieval.metrics.votes import SampledAnswers
from lam.tuning.ambiguity import Ambiguity, learn
from lam.tuning.scale import CLIPPED_LIMIT, Tuned, best_posterior, calibrate_scale
from lam.vmf.embeddings import Embeddings

RATES = 0.01, 0.05, 0.1
SINGLE = "cosine", "relative_mahalanobis"
"""Single scores that are compared with the probability as accept statistics."""
LOOSE = Targets(far=0.5, ood=0.05, conformal_miss=0.5)  # thresholds are taken at each rate in turn
GALLERY, MOST, DIMENSION, STEPS = {"faces": 4}, 60, 128, 600
RESAMPLES = 300


@dataclass(frozen=True)
class Part:
    """Items of one part of a draw: their embeddings, features and classes."""

    embeddings: Embeddings
    features: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Draw:
    """The parts of a cell in one draw."""

    gallery: Part
    calibration: Part
    test: Part
    aside: Part
    strange: Part


@dataclass(frozen=True)
class Cell:
    """The features of a cell, split by one draw, and the layer on them."""

    rows: dict[str, Tensor]
    features: Tensor
    labels: Tensor
    weight: Tensor
    bias: Tensor | None

    def of(self, part: str) -> tuple[Tensor, Tensor]:
        """Features and labels of a part."""
        return self.features[self.rows[part]], self.labels[self.rows[part]]

    def posterior(self, **settings: Any) -> Posterior:
        """The posterior fitted on the gallery; with one picture per class, two neighbours in the list form a pair.

        If most of its variance comes from clipped weights, it is fitted again and tuned, as `tune` of an encoder does.
        """
        x, y = self.of("gallery")
        pairs = y if int(y.bincount().max()) > 1 else torch.arange(len(y)) // 2
        encoder = fit_features(x, pairs, self.weight, self.bias, Laplace(margin=0.7, **settings))
        if encoder.posterior.clipped_variance_share(self.of("calibration")[0]) <= CLIPPED_LIMIT:
            return encoder.posterior
        others = (tuned(self, other) for other in encoder.fitted.without_clipping())
        return best_posterior(tuned(self, encoder.posterior), others).posterior


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a cell, without the layer before the features."""
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if name != "previous"}  # noqa: SIM118


def part(file: Path, data: str, seed: int) -> Cell:
    """Split the features of a cell, and train a head if the network has none."""
    tensors = read(file)
    features, labels = tensors["features"].float(), tensors["labels"].long()
    rows = parted(tensors, labels, data, seed)
    x, y = features[rows["gallery"]], labels[rows["gallery"]]
    if "head" in tensors:
        weight, bias = tensors["head"].float(), None
    elif data == "emoji":  # one picture a class: nothing to train on but principal components
        mean, axes = x.mean(0), torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh[:DIMENSION].contiguous()
        weight, bias = axes, -(axes @ mean)
    else:
        weight, bias = trained_head(x, y, seed)
    return Cell(rows, features, labels, weight, bias)


def draw(cell: Cell) -> Draw:
    """The parts of a cell, embedded by the default posterior."""
    posterior = cell.posterior()
    return Draw(**{name: Part(posterior.predict(cell.of(name)[0]), *cell.of(name)) for name in cell.rows})


STRUCTURES: dict[str, dict[str, Any]] = {
    "diag, prior 1": {"structure": "diag", "prior_precision": 1.0},
    "kron": {"structure": "kron"},
}
"""The posteriors of `measure_posteriors`. The first was the default earlier, the last is the default."""


def measure_posteriors(cell: Cell) -> dict[str, Any]:
    """Metrics of κ and votes for several posteriors, their widths tuned on the calibration queries."""
    x, queries, strange = (cell.of(name)[0] for name in ("gallery", "test", "strange"))
    measured: dict[str, Any] = {}
    for name, settings in STRUCTURES.items():
        started = time.perf_counter()
        posterior = cell.posterior(**settings)
        seconds = time.perf_counter() - started
        chosen = tuned(cell, posterior)
        batches, relevance = _searched(cell, "test")
        own = F.normalize(torch.cat([chosen.posterior.outputs(batch) for batch in batches]))
        hits, _ = rank(own[relevance.queries], own[relevance.gallery], k=10)
        draw = chosen.posterior.joint_predictor(chosen.posterior.noise(32))
        answers = SampledAnswers(torch.cat([draw(batch) for batch in batches], 1), relevance, hits)
        votes, correct = answers.votes(), relevance.of_hits(hits[:, :1])[:, 0]
        known, outside = chosen.posterior.predict(queries), chosen.posterior.predict(strange)
        (cosine, joint), (cosine_outside, joint_outside) = (
            chosen.posterior.cosine_variance(part, x[(predicted.mean @ own[: len(x)].T).argmax(1)])
            for part, predicted in ((queries, known), (strange, outside))
        )
        measured[name] = {
            "auroc": auroc(-known.kappa, -outside.kappa),
            "auroc_variance": auroc(known.variance, outside.variance),
            "auroc_joint": auroc(joint, joint_outside),
            "auroc_cosine": auroc(-cosine, -cosine_outside),
            "ausc": ausc(correct, -known.kappa),
            "ausc_joint": ausc(correct, joint),
            "ausc_cosine": ausc(correct, -cosine),
            "ausc_votes": ausc(correct, -votes.agree.double()),
            "ece": votes.binned().expected_error,
            "ece_by_chance": votes.binned().error_by_chance,
            "log_score": float(answers.votes_for_first_hit().log_score.mean()),
            "variance_clipped": chosen.tuning.clipped_share,
            "scale_says_nothing": chosen.tuning.is_flat,
            "cosine": chosen.tuning.direction_cosine,
            "seconds": seconds,
        }
        if name == "kron":
            ambiguity = ambiguity_of(cell)
            whole, whole_outside = (
                ambiguity(part, predicted).kappa for part, predicted in ((queries, known), (strange, outside))
            )
            measured[name] |= {"auroc_learnt": auroc(-whole, -whole_outside), "ausc_learnt": ausc(correct, -whole)}
    return measured


def tuned(cell: Cell, posterior: Posterior) -> Tuned:
    """A posterior with the width that the calibration queries choose."""
    return calibrate_scale(posterior, *_searched(cell, "calibration"))


def ambiguity_of(cell: Cell) -> Ambiguity:
    """κ_a and p_known learned on the calibration queries, with the gallery as further known items."""
    (x, y), (asked, of_asked) = cell.of("gallery"), cell.of("calibration")
    is_asked = torch.arange(len(of_asked) + len(y)) < len(of_asked)
    features, relevance = torch.cat([asked, x]), LabelRelevance(torch.cat([of_asked, y]), is_asked)
    return learn(features, mean_of(cell, features), relevance)


def mean_of(cell: Cell, features: Tensor) -> Tensor:
    """Directions by the layer on the features."""
    return F.normalize(F.linear(features, cell.weight, cell.bias))


RATIOS = tuple(10.0**exponent for exponent in range(-6, 1))
"""Prior precisions in units of the mean of s h."""


def measure_ratios(cell: Cell) -> dict[str, float]:
    """AUROC by κ of set-aside classes against calibration queries, for each ratio: only validation data."""
    posterior, known, aside = cell.posterior(), cell.of("calibration")[0], cell.of("aside")[0]
    found = {}
    for ratio in RATIOS:
        scale = (
            10 * posterior.alpha / (ratio * posterior.curvature.level)
        )  # of the same variance where nothing is known
        narrow = replace(posterior, prior_ratio=ratio, likelihood_scale=scale)
        found[f"{ratio:g}"] = auroc(-narrow.predict(known).kappa, -narrow.predict(aside).kappa)
    return found


def _searched(cell: Cell, queries: str) -> tuple[list[Tensor], LabelRelevance]:
    """The gallery and queries of a part, and the matches of each query."""
    (x, y), (features, labels) = cell.of("gallery"), cell.of(queries)
    is_query = torch.arange(len(y) + len(labels)) >= len(y)
    return [x, features], LabelRelevance(torch.cat([y, labels]), is_query)


def trained_head(x: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A linear head on frozen features, by SupCon: 600 batches of 256, dropout one half."""
    torch.manual_seed(seed)
    scale = math.sqrt(x.shape[1]) / float(x.norm(dim=1).mean())
    layer, loss = nn.Linear(x.shape[1], min(DIMENSION, x.shape[1])), SupCon(temperature=0.1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, weight_decay=1e-2)
    for _ in range(STEPS):
        batch = torch.randperm(len(x))[:256]
        pairs = Pairs.by_label(y[batch])
        if not pairs.positive.any():
            continue
        value = loss(F.normalize(layer(F.dropout(x[batch] * scale))), pairs)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return layer.weight.detach() * scale, layer.bias.detach()


def parted(tensors: dict[str, Tensor], labels: Tensor, data: str, seed: int) -> dict[str, Tensor]:
    """Rows of each part: of 10 classes, 6 are known and 2 held out; of characters, one alphabet in turn is strange."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{data} {seed}".encode()))

    def shuffled(values: Tensor) -> Tensor:
        return values[torch.randperm(len(values), generator=generator)]

    counts = labels[labels >= 0].bincount()
    classes = shuffled((counts >= (2 if data == "emoji" else 4)).nonzero().flatten())
    if data == "omniglot":
        alphabet = torch.tensor([int(tensors["alphabet"][labels == one][0]) for one in classes.tolist()])
        n = int(alphabet.max()) + 1
        strange, aside = (classes[alphabet == (seed + more) % n] for more in (0, 1))
        known = classes[(alphabet != seed % n) & (alphabet != (seed + 1) % n)]
    else:
        known, aside, strange = classes.tensor_split([round(0.6 * len(classes)), round(0.8 * len(classes))])
    if data == "emoji":
        maker = tensors["maker"]
        of = lambda names, who: (torch.isin(labels, names) & (maker == who)).nonzero().flatten()  # noqa: E731
        first, second = known.tensor_split(2)
        queries = {"calibration": of(first, 1), "test": of(second, 1), "aside": of(aside, 1), "strange": of(strange, 1)}
        return {"gallery": of(known, 0), **queries}
    rows: dict[str, list[Tensor]] = {"gallery": [], "calibration": [], "test": []}
    for one in known.tolist():
        items = shuffled((labels == one).nonzero().flatten())[:MOST]
        n = GALLERY.get(data, len(items) // 2)
        parts = items.tensor_split([n, n + max(1, (len(items) - n) // 2)])
        for name, part in zip(rows, parts, strict=True):
            rows[name].append(part)
    others = {"aside": aside, "strange": strange}
    limited = {
        name: [shuffled((labels == one).nonzero().flatten())[:MOST] for one in of.tolist()]
        for name, of in others.items()
    }
    return {name: torch.cat(parts) for name, parts in {**rows, **limited}.items()}


def measure(parts: Draw, seed: int) -> dict[str, Any]:
    """AUROC of strangers and AUSC by every score, and answered shares at promised rates."""
    gallery, asked, test = parts.gallery, parts.calibration, parts.test
    data, found = calibration_data(asked, gallery), searched(test, gallery)
    searches = data.searches
    aside, strange = (as_strangers(part, gallery) for part in (parts.aside, parts.strange))
    measured: dict[str, Any] = {
        "recall@1": float(found.correct.double().mean()),
        "queries": len(found),
        "calibration_queries": len(searches),
    }
    for name, strangers in (("alone", None), ("set_aside", aside)):
        made = calibrate(replace(data, strangers=strangers), Choices(LOOSE), key="")
        known, no_match = of_queries(made, test, found, gallery)
        outside = asked_of(made, strange)
        measured[name] = {
            "flag": made.flag,
            "accept": made.accept,
            **flags(made, known, outside),
            **answers(made, known, found.correct, seed),
            "promised_of_no_match" if strangers is None else "promised_of_strangers": {
                f"{rate:g}": promised(made, rate, searches, aside, known, found.correct, no_match, outside)
                for rate in RATES
            },
        }
    return measured


def calibration_data(asked: Part, gallery: Part) -> CalibrationData:
    """Searches of a part in the gallery, to calibrate on."""
    return CalibrationData(
        searched(asked, gallery),
        asked.embeddings,
        asked.features,
        asked.labels,
        gallery_labels=gallery.labels,
        reference=Reference.of(gallery.features, gallery.labels, embeddings=gallery.embeddings.mean),
    )


def searched(part: Part, gallery: Part) -> Searches:
    """Searches for queries of known classes."""
    return search_open_set(
        part.embeddings.mean, gallery.embeddings.mean, lambda rows: part.labels[rows][:, None] == gallery.labels
    )


def as_strangers(part: Part, gallery: Part) -> OtherQueries:
    """Searches for queries of other classes."""
    found = searched(part, gallery)
    labels = gallery.labels[found.hits]
    return OtherQueries(part.embeddings, found.cosines, labels, part.features, part.labels)


Asked = tuple[dict[str, Tensor], Any]
"""Scores of queries, and the decisions."""


def asked_of(made: Calibration, queries: OtherQueries) -> Asked:
    """Decisions on queries."""
    hits = Hits(torch.zeros_like(queries.labels), queries.cosines, torch.ones_like(queries.cosines))  # type: ignore
    found: dict[str, Any] = {"features": queries.features, "labels": queries.labels}
    scores = made.scores(hits, queries.embeddings, **found)
    scores[COMBINED] = made.detector.ood_score(COMBINED, scores)
    return scores, made.decide(hits, queries.embeddings, **found)


def of_queries(made: Calibration, part: Part, found: Searches, gallery: Part) -> tuple[Asked, Asked]:
    """Decisions on known queries, and on the same queries without their matches."""
    width = int(found.others.isfinite().sum(1).min())
    more = [found.others[:, width - 1 : width]] * (found.others.shape[1] - width)  # a small gallery has no more hits
    places = [found.other_hits[:, width - 1 : width]] * len(more)
    known = OtherQueries(part.embeddings, found.cosines, gallery.labels[found.hits], part.features)
    others = torch.cat([found.others[:, :width], *more], 1), torch.cat([found.other_hits[:, :width], *places], 1)
    no_match = OtherQueries(part.embeddings, others[0], gallery.labels[others[1]], part.features)
    return asked_of(made, known), asked_of(made, no_match)


def flags(made: Calibration, known: Asked, outside: Asked) -> dict[str, Any]:
    """AUROC of strangers by every score."""
    by_score = {name: auroc(known[0][name], outside[0][name]) for name in known[0]}
    by_score |= {
        name: auroc(-getattr(known[1], name), -getattr(outside[1], name)) for name in ("probability", "p_known")
    }
    means = {kind: float(one[1].probability.mean()) for kind, one in (("known", known), ("strangers", outside))}
    best = max(by_score[name] for name in SINGLE)
    return {
        "auroc": by_score,
        "auroc_of_flag": by_score[made.flag],
        "behind": best - by_score[made.flag],
        "mean": means,
    }


def answers(made: Calibration, known: Asked, correct: Tensor, seed: int) -> dict[str, Any]:
    """AUSC by every score and by both probabilities, and ECE of P(right | known)."""
    scores, decisions = known
    doubts = {**scores, "right_if_known": -decisions.right_if_known, "probability": -decisions.probability}
    by_score = {name: ausc(correct, doubt) for name, doubt in doubts.items()}
    best = max((name for name in scores), key=lambda name: by_score[name])
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randint(len(correct), (len(correct),), generator=generator) for _ in range(RESAMPLES)]

    def behind(name: str) -> dict[str, Any]:
        ours, theirs = doubts[name], doubts[best]
        error = torch.tensor([ausc(correct[of], theirs[of]) - ausc(correct[of], ours[of]) for of in draws]).std()
        gap = by_score[best] - by_score[name]
        return {"gap": gap, "error": float(error), "not_behind": gap <= max(0.002, float(error))}

    bins = probability_bins(decisions.right_if_known, correct)
    return {
        "ausc": by_score,
        "ausc_best_single": best,
        "ausc_behind": {name: behind(name) for name in ("right_if_known", "probability")},
        "ece": bins.expected_error,
        "ece_by_chance": bins.error_by_chance,
    }


def promised(
    made: Calibration,
    rate: float,
    searches: Searches,
    aside: OtherQueries,
    known: Asked,
    correct: Tensor,
    no_match: Asked,
    outside: Asked,
) -> dict[str, Any]:
    """Answered and rightly answered shares at a promised rate, by the calibration's statistic and by single scores.

    `same_rate` is for thresholds that accept exactly the rate among the test queries without an answer.
    """
    of_strangers = made.false_accepts.classes is not None
    refused = outside if of_strangers else no_match
    statistics = {made.accept: lambda one: one[1].statistic}
    statistics |= {name: lambda one, name=name: -one[0][name] for name in SINGLE}
    found: dict[str, Any] = {
        "same_rate": {
            name: _share((take(known) > _quantile(take(refused), rate)) & correct) for name, take in statistics.items()
        }
    }
    if rate < (least := least_rate(made.false_accepts.n_units)):
        return {**found, "least": least}
    thresholds = {made.accept: made.false_accepts.threshold(rate)}
    if of_strangers:
        of_aside = asked_of(made, aside)
        for name in SINGLE:
            thresholds[name] = ConformalScores.of(-of_aside[0][name], aside.classes).threshold(rate)
    else:
        thresholds["cosine"] = ConformalScores.of(searches.non_mated).threshold(rate)
    for name, threshold in thresholds.items():
        take = statistics[name]
        n_wrong, n = int((take(refused) > threshold).sum()), len(take(refused))
        found[name] = {
            "answered_right": _share((take(known) > threshold) & correct),
            "false_accepts": n_wrong / n,
            "held": bool(n_wrong <= binom.ppf(0.975, n, rate)),
            "strangers_accepted": _share(take(outside) > threshold),
            "no_match_accepted": _share(take(no_match) > threshold),
        }
    is_above = known[1].statistic > thresholds[made.accept]
    return {**found, "not_flagged": _share((known[1].codes != ABSTAIN) & is_above & correct)}


def _share(which: Tensor) -> float:
    return float(which.double().mean())


def _quantile(values: Tensor, rate: float) -> float:
    return float(values.sort(descending=True).values[int(rate * len(values))])

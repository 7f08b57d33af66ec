"""A run's calibration in words: what `lam calibrate` prints."""

from collections.abc import Iterator

from lam.retrieval.decisions.acceptance import PROBABILITY
from lam.retrieval.decisions.calibration import Calibration

_SHOWN_SCORES = 5


def described(calibration: Calibration) -> Iterator[str]:
    """What the calibration of a run promises and was learnt from, in lines."""
    facts, targets = calibration.facts, calibration.targets
    left_out = f", {facts['without_label']} more without label left out" if facts["without_label"] else ""
    yield f"gallery: {calibration.gallery_size} items{left_out}; calibrated on {facts['queries']} queries"
    if calibration.is_stale(calibration.gallery_size + facts["without_label"]):
        yield "         those are searched too, and so many that no rate is known: answers are marked stale; label them"
    threshold = calibration.accept_above
    far, (low, high) = calibration.false_accepts.rate(threshold), calibration.false_accepts.interval(threshold)
    yield f"match: {_decides(calibration)}; false accepts {far:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    yield f"       {facts['false_accepts']}"
    yield f"       of queries with a match {calibration.recall(threshold):.4g} are answered, and rightly"
    flagged = f"{calibration.flag} above {calibration.flag_above:.6g}"
    flagged = f"kappa below {calibration.kappa_below:.6g}" if calibration.flag == "kappa" else flagged
    yield f"abstain: {flagged}; false flags at most {targets.ood:g}"
    if (ranking := calibration.detector.ranking) and facts["asked_flag"] is None:
        shown = ", ".join(f"{name} {area:.3f}" for name, area in list(ranking.items())[:_SHOWN_SCORES])
        yield f"       AUROC of strangers against known queries, cross-validated: {shown}, ..."
    ece, chance = calibration.reliability.expected_error, calibration.reliability.error_by_chance
    yield f"P(right | known): cross-validated ECE {ece:.4f} of queries with a match"
    yield f"       a perfect probability stays below {chance:.4f} on so many, in 95 of 100 draws"
    yield f"       from {_worth(calibration)}"
    yield f"P(known): {_known_from(calibration)}"
    reference = calibration.reference
    if reference is not None:
        size = f"{reference.nbytes / 2**20:.3g} MiB in the run's folder"
        yield f"       compared with {len(reference)} training items, {size}"
    share = f"{1 - targets.conformal_miss:g}"
    if calibration.depth is None:
        yield f"too few queries had a match to say how many hits hold one with probability {share}"
    else:
        yield f"a match is among the first {calibration.depth} hits with probability {share}"


def _decides(calibration: Calibration) -> str:
    """What a first hit is accepted by, and from where on."""
    if calibration.accept == PROBABILITY:
        return f"P(known) · P(right | known) above {calibration.accept_above:.9g}"
    return f"−{calibration.accept} above {calibration.accept_above:.9g}"


def _known_from(calibration: Calibration) -> str:
    """What P(known) is learnt from."""
    facts, contrast, usual = calibration.facts, calibration.answer.contrast, "from how unusual a query is"
    if contrast is None:
        return usual
    if contrast.is_mixture:
        share, low, high = (f"{number:.2g}" for number in facts["share_of_strangers"])
        mixture = f"{facts['n_unlabelled']} queries in {facts['unlabelled']}"
        return f"{usual}, and from {mixture}, {share} of them strangers (95 % interval {low} to {high})"
    strangers = f"{facts['n_strangers']} strangers" if facts["n_strangers"] else "these as if their classes were new"
    learnt = f"{usual}, from queries without their matches, and from {strangers}"
    return f"{learnt}; a share {contrast.share:g} of queries is expected to have no match"


def _worth(calibration: Calibration) -> str:
    """Which scores P(correct) is learnt from, and how much the first of them are worth."""
    worth, facts = calibration.answer.right.worth, calibration.facts
    if len(worth) == 1:
        right = round(facts["queries_with_match"] * facts["first_hit_right"])
        of_all = f"{right} of {facts['queries_with_match']} first hits are right"
        return f"{next(iter(worth))} alone: {of_all}, and it takes 10 right and 10 wrong to learn from more"
    parts = [f"{name} {share:.0%}" for name, share in list(worth.items())[:_SHOWN_SCORES]]
    return f"{len(worth)} scores: {', '.join(parts)}{', ...' if len(worth) > _SHOWN_SCORES else ''}"

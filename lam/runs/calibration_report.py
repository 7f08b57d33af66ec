"""A run's calibration in words: what `lam calibrate` prints."""

from collections.abc import Iterator

from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.conformal import needed

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
    yield f"match: cosine above {threshold:.9g}; false accepts {far:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    yield f"       {facts['false_accepts']}"
    if "strangers_accepted" in facts:
        share, low, high = facts["strangers_accepted"]
        classes = f"of the {facts['strangers_set_aside']} classes set aside"
        yield f"       {classes} {share:.4g} are accepted, 95 % interval {low:.4g} to {high:.4g}"
    flagged = f"{calibration.flag} above {calibration.flag_above:.6g}"
    flagged = f"kappa below {calibration.kappa_below:.6g}" if calibration.flag == "kappa" else flagged
    yield f"abstain: {flagged}; false flags at most {targets.ood:g}"
    if facts["in_place_of"] is not None:
        half, least = facts["queries"] // 2, needed(targets.ood)
        yield f"       in place of {facts['in_place_of']}, which has half of the queries, {half}, and needs {least}"
    expecting = "" if calibration.answers[0].contrast is None else ", while strangers are expected too"
    ece, chance = calibration.reliability.expected_error, calibration.reliability.error_by_chance
    yield f"P(correct): cross-validated ECE {ece:.4f} of known queries{expecting}"
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


def _known_from(calibration: Calibration) -> str:
    """What P(known) is learnt from."""
    facts, contrast, usual = calibration.facts, calibration.answers[0].contrast, "from how unusual a query is"
    if (estimate := facts.get("share_of_strangers")) is not None:
        share, low, high = (f"{number:.2g}" for number in estimate)
        mixture = f"{facts['n_others'][0]} queries in {facts['unlabelled']}"
        if contrast is not None and contrast.is_mixture:
            return f"{usual}, and from {mixture}, of which a share {share} ({low} to {high}) are strangers"
        extreme = "all be known" if estimate[1] == 0 else "all be strangers"
        mixture = f"{mixture}: their share of strangers is {share} ({low} to {high})"
        usual = f"{usual}, not from {mixture}, they may {extreme}"
    if contrast is None:
        return usual
    n, expected = facts["n_others"][-1], f"expected to be a share {contrast.share:g} of queries"
    if facts["own_classes"]:
        return f"{usual}, and from {n} queries whose matches were taken out of the gallery, as strangers, {expected}"
    return f"{usual}, and from {n} strangers, {expected}"


def _worth(calibration: Calibration) -> str:
    """Which scores P(correct) is learnt from, and how much the first of them are worth."""
    worth, facts = calibration.answers[0].right.worth, calibration.facts
    if len(worth) == 1:
        right = round(facts["queries_with_match"] * facts["first_hit_right"])
        of_all = f"{right} of {facts['queries_with_match']} first hits are right"
        return f"{next(iter(worth))} alone: {of_all}, and it takes 10 right and 10 wrong to learn from more"
    parts = [f"{name} {share:.0%}" for name, share in list(worth.items())[:_SHOWN_SCORES]]
    return f"{len(worth)} scores: {', '.join(parts)}{', ...' if len(worth) > _SHOWN_SCORES else ''}"

"""A run's calibration in words, and a decision by it: what `lam calibrate` and `lam search` print."""

from collections.abc import Iterator

from lam.retrieval.decisions.abstention import SearchDecisions
from lam.retrieval.decisions.acceptance import PROBABILITY
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.conformal import LEVEL

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
    if "strangers_accepted" in facts:
        share, low, high = facts["strangers_accepted"]
        classes = f"of the {facts['strangers_set_aside']} classes set aside"
        yield f"       {classes} {share:.4g} are accepted, 95 % interval {low:.4g} to {high:.4g}"
    yield f"       of queries with a match {calibration.recall(threshold):.4g} are answered, and rightly"
    if targets.wrong is not None:
        yield f"answers: at most {targets.wrong:g} of those answered are wrong, with confidence {LEVEL:g}"
        yield f"       {facts['answers_wrong']}; a higher statistic must not be wrong more often"
    flagged = f"{calibration.flag} above {calibration.flag_above:.6g}"
    flagged = f"kappa below {calibration.kappa_below:.6g}" if calibration.flag == "kappa" else flagged
    yield f"abstain: {flagged}; false flags at most {targets.ood:g}"
    if (ranking := calibration.detector.ranking) and facts["asked_flag"] is None:
        shown = ", ".join(f"{name} {area:.3f}" for name, area in list(ranking.items())[:_SHOWN_SCORES])
        yield f"       AUROC of strangers against known queries, cross-validated: {shown}, ..."
    ece, chance = calibration.reliability.expected_error, calibration.reliability.error_by_chance
    yield f"P(right | known), that the first hit is right if the gallery holds a match: cross-validated ECE {ece:.4f}"
    yield f"       a calibrated probability stays below {chance:.4f} on so many, in 95 of 100 draws"
    yield f"       from {_worth(calibration)}"
    yield f"P(known), that the gallery holds a match: {_known_from(calibration)}"
    reference = calibration.reference
    if reference is not None:
        size = f"{reference.nbytes / 2**20:.3g} MiB in the run's folder"
        yield f"       compared with {len(reference)} training items, {size}"
    if calibration.unseen is not None:
        single, share = int(calibration.unseen.is_single.sum()), calibration.unseen.share_of_new
        yield f"new classes: {single} classes have one item; at most {share:.3g} of new items are of a class not here"
        yield "       if the gallery is a random sample of what comes in, and the network was not trained on its items"
    share = f"{1 - targets.conformal_miss:g}"
    if calibration.depth is None:
        yield f"hits: too few queries had a match to say how many hits hold one with probability {share}"
    else:
        yield f"hits: if the gallery holds a match, one is among the first {calibration.depth} with probability {share}"


def _decides(calibration: Calibration) -> str:
    """What a first hit is accepted by, and from where on."""
    if calibration.accept == PROBABILITY:
        return f"P(known) · P(right | known) above {calibration.accept_above:.9g}"
    return f"{statistic_name(calibration.accept)} above {calibration.accept_above:.9g}"


def statistic_name(accept: str) -> str:
    """What decides, in words: the higher, the better the first hit."""
    return {PROBABILITY: "the probability", "cosine": "the cosine"}.get(accept, f"−{accept}")


def without_match(share: float) -> str:
    """A share of queries that have no match, as the subject of a sentence."""
    return "half of all queries" if share == 0.5 else f"{share:.3g} of all queries"


def answer_in_words(calibration: Calibration, decisions: SearchDecisions, row: int) -> Iterator[str]:
    """What a decision that is no abstention rests on: each number with its event and its condition, in lines."""
    known, right = float(decisions.p_known[row]), float(decisions.right_if_known[row])
    statistic, above = float(decisions.statistic[row]), float(decisions.accept_above[row])
    yield f"if the gallery holds it, the first hit is right: {right:.2f}"
    contrast = calibration.match_probability.contrast
    share = "" if contrast is None else f" (where {without_match(contrast.share)} have no match)"
    yield f"the gallery holds it at all: {known:.2f}{share}"
    together, accept = f"together {float(decisions.probability[row]):.2f}", decisions.accept[row]
    if accept != PROBABILITY:
        together = f"{together}; {statistic_name(accept)} decides: {statistic:.4g}"
    yield f"{together}; answered above {above:.4g}; {looks_as_good(float(decisions.false_accept[row]))}"


def looks_as_good(share: float) -> str:
    """How often a search without a match looks as good as this one."""
    if share >= 1:
        return "every search without a match looks as good"
    often = f"1 in {1 / share:.0f} searches" if share <= 0.2 else f"{share:.0%} of searches"
    return f"{often} without a match {'looks' if share <= 0.2 else 'look'} as good"


def _known_from(calibration: Calibration) -> str:
    """What P(known) is learnt from."""
    facts, contrast, usual = calibration.facts, calibration.match_probability.contrast, "from how unusual a query is"
    if contrast is None:
        return usual
    if contrast.is_mixture:
        share, low, high = (f"{number:.2g}" for number in facts["share_of_strangers"])
        mixture = f"{facts['n_unlabelled']} queries in {facts['unlabelled']}"
        return f"{usual}, and from {mixture}, a share {share} of them strangers (95 % interval {low} to {high})"
    if (estimate := facts.get("share_of_strangers")) is not None:
        share, low, high = (f"{number:.2g}" for number in estimate)
        may = "all be known" if estimate[1] == 0 else "all be strangers"
        mixture = f"{facts['n_unlabelled']} queries in {facts['unlabelled']}"
        usual = f"{usual}, not from {mixture}: their share of strangers is {share} ({low} to {high}), they may {may}"
    strangers = f"{facts['n_strangers']} strangers" if facts["n_strangers"] else "these as if their classes were new"
    learnt = f"{usual}, from queries without their matches, and from {strangers}"
    return f"{learnt}; {without_match(contrast.share)} are expected to have no match"


def _worth(calibration: Calibration) -> str:
    """Which scores P(correct) is learnt from, and how much the first of them are worth."""
    worth, facts = calibration.match_probability.right.worth, calibration.facts
    if len(worth) == 1:
        right = round(facts["queries_with_match"] * facts["first_hit_right"])
        of_all = f"{right} of {facts['queries_with_match']} first hits are right"
        return f"{next(iter(worth))} alone: {of_all}, and it takes 10 right and 10 wrong to learn from more"
    parts = [f"{name} {share:.0%}" for name, share in list(worth.items())[:_SHOWN_SCORES]]
    return f"{len(worth)} scores: {', '.join(parts)}{', ...' if len(worth) > _SHOWN_SCORES else ''}"

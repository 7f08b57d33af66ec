"""Text of `lam calibrate` and `lam search`: a calibration and its decisions in words."""

from collections.abc import Iterator

from lam.retrieval.decisions.abstention import SearchDecisions
from lam.retrieval.decisions.acceptance import PROBABILITY
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.conformal import LEVEL, least_rate, needed

_SHOWN_SCORES = 5


def describe_calibration(calibration: Calibration) -> Iterator[str]:
    """Lines of text: the bounds of a calibration, and the evidence for them."""
    facts, targets = calibration.facts, calibration.targets
    left_out = f", {facts['without_label']} more without label left out" if facts["without_label"] else ""
    yield f"gallery: {calibration.gallery_size} items{left_out}; calibrated on {facts['queries']} queries"
    if calibration.is_stale(calibration.gallery_size + facts["without_label"]):
        yield "         too many searched items lack a label for any bound: answers are marked stale; label these items"
    threshold = calibration.accept_above
    far, (low, high) = calibration.false_accepts.rate(threshold), calibration.false_accepts.interval(threshold)
    by = "P(known) · P(right | known)" if calibration.accept == PROBABILITY else statistic_name(calibration.accept)
    yield f"match: {by} above {threshold:.9g}; false accepts {far:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    yield f"       {facts['false_accepts']}"
    if "strangers_accepted" in facts:
        share, low, high = facts["strangers_accepted"]
        classes = f"of the {facts['held_out_classes']} held-out classes"
        yield f"       share {classes} that is accepted: {share:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    yield f"       share of queries with a match that are answered correctly: {calibration.recall(threshold):.4g}"
    if targets.wrong is not None:
        yield f"answers: at most {targets.wrong:g} of the answers are wrong, with confidence {LEVEL:g}"
        yield f"       {facts['answers_wrong']}; assumes that a higher statistic is not wrong more often"
    flagged = f"{calibration.flag} above {calibration.flag_above:.6g}"
    flagged = f"kappa below {calibration.kappa_below:.6g}" if calibration.flag == "kappa" else flagged
    yield f"abstain: {flagged}; false flags at most {targets.ood:g}"
    if (ranking := calibration.detector.ranking) and facts["asked_flag"] is None:
        shown = ", ".join(f"{name} {area:.3f}" for name, area in list(ranking.items())[:_SHOWN_SCORES])
        yield f"       AUROC of strangers against known queries, cross-validated: {shown}, ..."
    ece, chance = calibration.reliability.expected_error, calibration.reliability.error_by_chance
    yield f"P(right | known), that the first hit is right if the gallery holds a match: cross-validated ECE {ece:.4f}"
    yield f"       a perfectly calibrated probability has an ECE below {chance:.4f} in 95 of 100 samples of this size"
    yield f"       from {_worth(calibration)}"
    yield f"P(known), that the gallery holds a match: {_known_from(calibration)}"
    reference = calibration.reference
    if reference is not None:
        size = f"{reference.nbytes / 2**20:.3g} MiB in the run's folder"
        yield f"       compared with {len(reference)} training items, {size}"
    if calibration.unseen is not None:
        single, share = int(calibration.unseen.is_single.sum()), calibration.unseen.share_of_new
        classes = "1 class has" if single == 1 else f"{single} classes have"
        yield f"new classes: {classes} one item; at most {share:.3g} of new items are of a new class"
        yield "       if the gallery is a random sample of incoming items, and the network was not trained on its items"
    share = f"{1 - targets.conformal_miss:g}"
    if calibration.depth is None:
        yield f"hits: too few queries had a match to say how many hits include one with probability {share}"
    else:
        place = "the first hit is one" if calibration.depth == 1 else f"one is among the first {calibration.depth}"
        yield f"hits: if the gallery holds a match, {place} with probability {share}"


def bounded_queries(
    what: str, *, folder: str | None, strangers: str | None, is_trained: bool, n_classes: int, far: float
) -> str:
    """Text that names the queries whose false accepts `far` bounds; other queries may be accepted much more often.

    `what` is `classes`, `identities` or `questions`. `folder` holds fresh images; None for the validation split.
    `n_classes` is the number of classes of the strangers or, without a folder of them, of held-out classes.
    """
    if strangers is not None:
        like = "strangers like the ones" if n_classes == 0 else f"a random item of a new class, like the {n_classes}"
        return f"for {like} in {strangers}"
    if n_classes >= needed(far):
        return f"for a random item of an unseen class, like the {n_classes} held-out classes"
    sentence = f"for known {what}; no bound for unseen {what}"
    if folder is not None or not is_trained or what == "questions":  # every question is new
        source = (
            f"the {what} in {folder}"
            if folder is not None
            else f"the {'training' if is_trained else 'calibration'} {what}"
        )
        sentence = f"for {what} like {source}; no bound for others"
    if not n_classes:
        return sentence
    least = least_rate(n_classes)
    return f"{sentence}: {n_classes} held-out classes can bound a rate of {least:g} or more (--target-far {least:g})"


def query_mixture(n_queries: int, n_without_match: int, n_strangers: int, strangers: str | None) -> str:
    """Words for the queries to which the bound on wrong answers applies; `strangers` is None for held-out classes.

    A class of strangers counts as one stranger.
    """
    without = n_without_match + n_strangers
    share = f"{without / (n_queries + n_strangers):.2g} of them" if without else "none of them"
    whom = ""
    if n_strangers:
        whom = f" and strangers {'of held-out classes' if strangers is None else f'like the ones in {strangers}'}"
    return f"for queries like the calibration queries{whom}, {share} without a match in the gallery"


def statistic_name(accept: str) -> str:
    """Name of the statistic that accepts a match; higher means a better first hit."""
    names = {PROBABILITY: "the probability", "cosine": "the cosine", "mean_cosine": "the mean cosine"}
    return names.get(accept, f"−{accept}")


def without_match(share: float) -> str:
    """A share of all queries, in words."""
    return "half of all queries" if share == 0.5 else f"{share:.3g} of all queries"


def answer_in_words(calibration: Calibration, decisions: SearchDecisions, row: int) -> Iterator[str]:
    """Lines that state the probabilities of an answer, each with its event and condition."""
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
    """A clause on the `share` of searches without a match whose first hit is at least as good."""
    if share >= 1:
        return "every search without a match looks as good"
    often = f"1 in {1 / share:.0f} searches" if share <= 0.2 else f"{share:.0%} of searches"
    return f"{often} without a match {'looks' if share <= 0.2 else 'look'} as good"


def _known_from(calibration: Calibration) -> str:
    """The evidence for P(known) in words."""
    facts, contrast, usual = calibration.facts, calibration.match_probability.contrast, "from how unusual a query is"
    if contrast is None:
        return usual
    if (estimate := facts.get("share_of_strangers")) is not None:
        share, low, high = (f"{number:.2g}" for number in estimate)
        mixture = f"{facts['n_unlabelled']} queries in {facts['unlabelled']}"
        if contrast.is_mixture:
            return f"{usual}, and from {mixture}, a share {share} of them strangers (95 % interval {low} to {high})"
        may = "all be known" if estimate[1] == 0 else "all be strangers"
        usual = f"{usual}, not from {mixture}: their share of strangers is {share} ({low} to {high}), so they may {may}"
    strangers = f"{facts['n_strangers']} strangers" if facts["n_strangers"] else "the same with their classes as new"
    learned = f"{usual}, from queries without their matches, and from {strangers}"
    return f"{learned}; {without_match(contrast.share)} are expected to have no match"


def _worth(calibration: Calibration) -> str:
    """The scores behind P(right | known) in words, with the shares of the most important ones."""
    worth, facts = calibration.match_probability.right.worth, calibration.facts
    if len(worth) == 1:
        right = round(facts["queries_with_match"] * facts["first_hit_right"])
        of_all = f"{right} of {facts['queries_with_match']} first hits are right"
        return f"{next(iter(worth))} alone: {of_all}; learning from more scores takes 10 right and 10 wrong"
    parts = [f"{name} {share:.0%}" for name, share in list(worth.items())[:_SHOWN_SCORES]]
    return f"{len(worth)} scores: {', '.join(parts)}{', ...' if len(worth) > _SHOWN_SCORES else ''}"

"""The tables of README and docs, written between their markers from the results.

    python benchmarks/table.py

A page holds `<!-- table NAME -->`, the table, and `<!-- end -->`; NAME is a function of this file, decorated with
`@table`. A test compares the pages with the output of these functions. ± has no spaces around it, and × follows a
number, so that tables stay narrow.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from timing import RESULTS, kept

from lam.inputs.corruption import KINDS
from lam.methods import METHODS
from lam.retrieval.decisions.flags import COMBINED
from lam.retrieval.metrics.registry import describe
from lam.retrieval.metrics.scores import SCORES
from lam.runs.corruption import TEXT_KINDS
from lam.runs.sweep import summary

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NOTHING = "—"
Row = Sequence[str]
TABLES: dict[str, Callable[[], list[Row]]] = {}


def table(make: Callable[[], list[Row]]) -> Callable[[], list[Row]]:
    """Register a function that returns the rows of a table, the head first, under its name."""
    TABLES[make.__name__] = make
    return make


def filled(text: str) -> str:
    """The page with its tables filled."""

    def made(found: re.Match[str]) -> str:
        head, *rows = count_once(TABLES[found[2]]())
        lines = [f"| {' | '.join(row)} |".replace(" ± ", "±").replace(" × |", "× |") for row in (head, *rows)]
        rule = f"|{'---|' * len(head)}"
        return "\n".join((found[1], "", lines[0], rule, *lines[1:], "", found[3]))

    return re.sub(r"(<!-- table (\w+) -->)\n.*?(<!-- end -->)", made, text, flags=re.DOTALL)


def count_once(rows: list[Row]) -> list[Row]:
    """The rows, with a common number of seeds, draws or splits moved to the head."""
    (first, *heads), *body = rows
    counts = {found[1] if (found := re.search(r" \((\d+)\)$", row[0])) else "" for row in body}
    if counts == {""} or len(counts) > 1 or not re.search(r"\((seeds|draws|splits)\)", first):
        return rows
    (count,) = counts
    first = re.sub(r"\((\w+)\)", rf"({count} \1)", first)
    return [[first, *heads], *([row[0].removesuffix(f" ({count})"), *row[1:]] for row in body)]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def over_seeds(results: dict[str, Any], figures: Iterable[str], digits: int = 3) -> list[str]:
    """Mean ± standard deviation of each figure; a dash if it was not measured."""
    means, deviations = results["mean"], results["std"]
    return [
        f"{means[figure]:.{digits}f} ± {deviations[figure]:.{digits}f}" if means.get(figure) is not None else NOTHING
        for figure in figures
    ]


def names(figures: Iterable[str]) -> list[str]:
    return [describe(figure).name for figure in figures]


# Real pretrained networks: docs/results/pretrained.md, and in short the README.

REAL = {
    "faces__faces": "faces, face network",
    "efficientnet_lite0__faces": "faces",
    "efficientnet_lite0__stamps": "drawings",
    "efficientnet_lite0__emoji": "emoji",
    "efficientnet_lite0__cifar10": "photographs",
    "efficientnet_lite0__omniglot": "characters",
    "minilm__clinc150": "clinc150",
    "minilm__banking77": "banking77",
    "minilm__docstrings": "docstrings",
    "minilm__debian": "packages",
}
"""Cells of `real.py`, and their names in tables; images without a network's name are by EfficientNet-Lite0."""
REAL_HELD_OUT = {
    "minilm__libraries": "docstrings of ten libraries",
    "efficientnet_lite0__clothes": "clothes",
    "efficientnet_lite0__digits": "digits",
}
"""Cells of `real.py` that were measured last."""
ALONE, ASIDE = "alone", "set_aside"
OF_ALONE, OF_ASIDE = "promised_of_no_match", "promised_of_strangers"


def draws_of(cell: str) -> list[dict[str, Any]]:
    return read(f"real/{cell}")["draws"]


def spread_of(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard deviation over draws; a dash for none."""
    if not values:
        return NOTHING
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def of_real(
    heads: Sequence[str],
    digits: int,
    figures: Sequence[Callable[[dict[str, Any]], float]],
    cells: Mapping[str, str] = REAL,
) -> list[Row]:
    """A row for each cell, a column for each figure, over draws."""
    table: list[Row] = [["data", *heads]]
    for cell, title in cells.items():
        table.append([title, *(spread_of([figure(one) for one in draws_of(cell)], digits) for figure in figures)])
    return table


def of_score(figure: str, score: str) -> Callable[[dict[str, Any]], float]:
    """A figure of a score in a draw whose calibration has no strangers."""
    return lambda one: one[ALONE][figure][score]


def of_posterior(name: str, figure: str) -> Callable[[str], list[float]]:
    """A figure of a posterior of `real.py posteriors`, in the draws of a cell."""
    return lambda cell: [float(one[name][figure]) for one in read(f"real_posteriors/{cell}")["draws"]]


BEFORE, NOW = "diag, prior 1", "kron"
"""The paper's posterior, and the default."""


def of_posteriors(heads: Sequence[str], digits: int, columns: Sequence[Callable[[str], list[float]]]) -> list[Row]:
    """A row for each cell of `real.py posteriors`."""
    measured = [cell for cell in REAL if (RESULTS / "real_posteriors" / f"{cell}.json").exists()]
    return [
        ["data (draws)", *heads],
        *(
            [f"{REAL[cell]} ({len(columns[0](cell))})", *(spread_of(of(cell), digits) for of in columns)]
            for cell in measured
        ),
    ]


@table
def posterior_strangers() -> list[Row]:
    """AUROC of strangers by κ of two posteriors, by the variance of the cosine, and by cheap scores."""
    columns = [
        of_posterior(NOW, "auroc_cosine"),
        lambda cell: [one[ALONE]["auroc"]["relative_mahalanobis"] for one in draws_of(cell)],
        of_posterior(BEFORE, "auroc"),
        of_posterior(NOW, "auroc"),
        of_posterior(NOW, "auroc_learnt"),
        of_posterior(NOW, "auroc_joint"),
    ]
    heads = ["first cosine", "relative Mahalanobis", "κ, `diag`, α = 1", "**κ**", "**κ, with ambiguity**"]
    heads.append("variance of the cosine")
    return of_posteriors(heads, 2, columns)


@table
def cosine_intervals() -> list[Row]:
    """Coverage of intervals at hits, for all queries and for the third with the smallest κ, and interval scores."""
    files = {name: RESULTS / "real_intervals" / f"{cell}.json" for cell, name in REAL.items()}
    draws = {name: json.loads(file.read_text())["draws"] for name, file in files.items() if file.exists()}
    widths = "one width", "κ^(-1/4)"
    heads = [f"{what}: {width}" for what in ("coverage", "coverage, least κ", "interval score") for width in widths]
    figures = [("coverage", 2), ("coverage_least_kappa", 2), ("score", 3)]
    rows = [
        [name, *(f"{mean(one[width][key] for one in of):.{digits}f}" for key, digits in figures for width in widths)]
        for name, of in draws.items()
        if None not in of
    ]
    return [["data", *heads], *rows]


@table
def posterior_votes() -> list[Row]:
    """AUSC of κ and ECE of the votes of two posteriors; the JSON has the log score."""
    columns = [of_posterior(name, figure) for figure in ("ausc", "ece") for name in (BEFORE, NOW)]
    columns.append(of_posterior(NOW, "ece_by_chance"))
    heads = [f"{title}: {name}" for title in ("AUSC of κ", "ECE of votes") for name in ("`diag`, α = 1", "default")]
    heads.append("ECE by chance")
    return of_posteriors(heads, 3, columns)


WORTH = {
    "faces__faces": "faces",
    "efficientnet_lite0__stamps": "drawings",
    "efficientnet_lite0__cifar10": "photographs",
    "efficientnet_lite0__omniglot": "characters",
    "minilm__clinc150": "questions (CLINC150)",
    "minilm__banking77": "questions (BANKING77)",
}
"""The cells of `real.py` that the README shows."""


@table
def worth() -> list[Row]:
    """The flag and the probability, with the cosine of the first hit, in short."""
    heads = [
        *("AUROC of strangers: cosine", "AUROC of strangers: lam's flag"),
        *("answered: cosine", "answered: lam"),
    ]
    table: list[Row] = [["data", *heads]]
    for cell, title in WORTH.items():
        aside = [one[ASIDE] for one in draws_of(cell)]
        same = [(one[OF_ASIDE]["0.05"]["same_rate"], one["accept"]) for one in aside]
        figures = (
            [one["auroc"]["cosine"] for one in aside],
            [one["auroc_of_flag"] for one in aside],
            [rates["cosine"] for rates, _ in same],
            [rates[accept] for rates, accept in same],
        )
        table.append([title, *map(spread_of, figures)])
    return table


@table
def real_elsewhere() -> list[Row]:
    """AUROC of strangers."""
    scores = ("kappa", "knn", "mahalanobis", "relative_mahalanobis", "cosine")
    heads = [*(SCORES[name].short for name in scores), "lam's flag", "lam's flag, classes held out"]
    flags = (lambda one: one[ALONE]["auroc_of_flag"], lambda one: one[ASIDE]["auroc_of_flag"])
    return of_real(heads, 2, [*(of_score("auroc", name) for name in scores), *flags])


@table
def real_right() -> list[Row]:
    """AUSC of the first hit, for queries with a match."""
    scores = ("kappa", "relative_mahalanobis", "cosine", "margin", "weighted_votes")
    figures = [*(of_score("ausc", name) for name in (*scores, "probability")), lambda one: one["recall@1"]]
    return of_real([*(SCORES[name].short for name in scores), "**probability**", "recall@1"], 3, figures)


@table
def real_answered() -> list[Row]:
    """Share of known queries with a right answer, if 5 % of the queries without an answer are accepted."""
    names = {"cosine": "first cosine", "relative_mahalanobis": "relative Mahalanobis", "": "lam"}
    table: list[Row] = [
        [
            "data",
            *(f"no match: {title}" for title in names.values() if title != "relative Mahalanobis"),
            *(f"strangers: {title}" for title in names.values()),
            "mean probability: known",
            "mean probability: strangers",
        ]
    ]
    for cell, title in REAL.items():
        draws = draws_of(cell)

        def same(way: str, key: str, name: str, draws: list[dict[str, Any]] = draws) -> str:
            return spread_of([one[way][key]["0.05"]["same_rate"][name or one[way]["accept"]] for one in draws])

        table.append(
            [
                title,
                *(same(ALONE, OF_ALONE, name) for name in names if name != "relative_mahalanobis"),
                *(same(ASIDE, OF_ASIDE, name) for name in names),
                *(spread_of([one[ALONE]["mean"][whose] for one in draws]) for whose in ("known", "strangers")),
            ]
        )
    return table


@table
def real_promised() -> list[Row]:
    """False accepts in the test at the strictest of two rates that the data can promise."""
    table: list[Row] = [
        ["data", "promised for", "rate", "false accepts", "draws inside", "answered right", "by first cosine"]
    ]
    for cell, title in REAL.items():
        for way, key, whom in ((ALONE, OF_ALONE, "no match"), (ASIDE, OF_ASIDE, "strangers")):
            for rate in ("0.05", "0.1"):
                rows = [(one[way][key][rate], one[way]["accept"]) for one in draws_of(cell)]
                rows = [(row, accept) for row, accept in rows if "least" not in row]
                if not rows:
                    continue
                ours = [row[accept] for row, accept in rows]
                inside = f"{sum(one['held'] for one in ours)}/{len(ours)}"
                shares = (spread_of([one[figure] for one in ours], 3) for figure in ("false_accepts", "answered_right"))
                false, right = shares
                cosine = spread_of([row["cosine"]["answered_right"] for row, _ in rows], 3)
                table.append([title, whom, rate, false, inside, right, cosine])
                break
    return table


@table
def real_errors() -> list[Row]:
    """ECE of P(right | known) and its value by chance, and draws in which it is not behind the best single score."""
    table: list[Row] = [["data", "test queries", "ECE", "ECE by chance", "AUSC not behind the best score"]]
    for cell, title in REAL.items():
        draws = draws_of(cell)
        ours = [one[ALONE] for one in draws]
        level = sum(one["ausc_behind"]["right_if_known"]["not_behind"] for one in ours)
        errors = (spread_of([one[figure] for one in ours], 3) for figure in ("ece", "ece_by_chance"))
        table.append([title, f"{draws[0]['queries']:,}", *errors, f"{level}/{len(ours)}"])
    return table


@table
def real_held_out() -> list[Row]:
    """AUROC of strangers, AUSC of the first hit and calibration error, on data that were measured last."""
    heads = ["AUROC: first cosine", "AUROC: relative Mahalanobis", "AUROC: lam's flag"]
    heads += ["AUSC: first cosine", "AUSC: probability", "ECE", "ECE by chance"]
    figures = [
        *(of_score("auroc", name) for name in ("cosine", "relative_mahalanobis")),
        lambda one: one[ASIDE]["auroc_of_flag"],
        *(of_score("ausc", name) for name in ("cosine", "probability")),
        *((lambda one, figure=figure: one[ALONE][figure]) for figure in ("ece", "ece_by_chance")),
    ]
    return of_real(heads, 3, figures, REAL_HELD_OUT)


@table
def new_data() -> list[Row]:
    """Decisions of `lam search` on new items and on classes that lam never saw."""
    heads = ["recall@1", "AUROC: first cosine", "AUROC: κ", "AUROC: probability", "false accepts", "false flags", "ECE"]
    figures = ["recall@1", *(f"auroc_right_{score}" for score in ("cosine", "kappa", "probability"))]
    figures += ["false_accepts", "false_flags", "ece_probability"]
    results, rows = read("new_data"), list[Row]([["data (draws)", *heads]])
    for data in ("icons", "definitions", "surfaces"):
        seeds = [[results[f"{data}{split} {seed}"] for seed in range(3)] for split in ("", ", validation split")]
        spreads = [[spread_of([one[figure] for one in kind], 3) for kind in seeds] for figure in figures]
        rows.append([f"{data} (3)", *(", ".join(dict.fromkeys(both)) for both in spreads)])
    return rows


# Both questions, by score, on networks that were trained for it.

MADE = ("inverted", "permuted", "blurred", "turned")
"""Kinds of alteration in `altered_images.py`."""
RIGHT = "p_right"


# P(right) beside each score that it is learned from.


def answered() -> dict[str, Any]:
    """Results of `answers.py` by data set."""
    return {name: results for name, results in read("answers").items() if "seeds" in results}


def seeds_of(results: dict[str, Any]) -> str:
    return f"({len(results['seeds'])})"


def spread(results: dict[str, Any], figure: str, digits: int = 3) -> str:
    """The mean, and the standard deviation if there are several seeds."""
    if results["mean"].get(figure) is None:
        return NOTHING
    deviation = results["std"].get(figure)
    return f"{results['mean'][figure]:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


@table
def answer_strangers() -> list[Row]:
    """SCOD-AUGRC of P(right) and of the best other score."""
    rows: list[Row] = [["data", "P(right)", "best other score"]]
    figure = "scod_augrc_"
    for name, results in answered().items():
        others = {each: value for each, value in results["mean"].items() if each.startswith(figure)}
        others.pop(figure + RIGHT)
        best = min(others, key=lambda each: others[each])
        ours, other = (spread(results, each) for each in (figure + RIGHT, best))
        rows.append([name, ours, f"{other} (`{best.removeprefix(figure)}`)"])
    return rows


@table
def answer_errors() -> list[Row]:
    rows: list[Row] = [
        [
            *("data (queries)", "recall@1", "AUSC behind (error)", "seeds not behind"),
            *("ECE (by chance)", "greatest gap, corrupted"),
        ]
    ]
    for name, results in answered().items():
        seeds = results["seeds"].values()
        first = next(iter(seeds))
        inside = f"{sum(row['not_behind'] for row in seeds)}/{len(seeds)}"
        figures = ("ece_if_known", "ece_of_the_perfect_if_known", "greatest_gap")
        behind = f"{results['mean']['behind']:+.4f} ({results['mean']['behind_error']:.4f})"
        ece, chance, gap = (spread(results, figure) for figure in figures)
        row = [behind, inside, f"{ece} ({chance})", gap]
        rows.append([f"{name} ({first['queries']:,})", spread(results, "recall@1"), *row])
    return rows


@table
def answers_corrupted() -> list[Row]:
    rows: list[Row] = [["data", "kind", "clean", "severity 5", "correlation"]]
    for name, results in answered().items():
        measured = results["mean"]
        for kind in (kind for kind in ("noise", "contrast", "typing") if f"{kind}_trend_{RIGHT}" in measured):
            gaps = (
                f"{measured[f'{kind}_{severity}_probability']:.2f}/{measured[f'{kind}_{severity}_accuracy']:.2f}"
                for severity in (0, 5)
            )
            rows.append([name, kind, *gaps, f"{measured[f'{kind}_trend_{RIGHT}']:+.2f}"])
    return rows


@table
def one_number() -> list[Row]:
    """The κ of an encoder that has learned its ambiguity, its parts and the cheap rivals, on real networks."""
    names = {
        "kappa": "**κ**",
        "kappa_aleatoric": "κ_a",
        "cosine": "first cosine",
        "relative_mahalanobis": "relative Mahalanobis",
    }
    heads = ["AUROC", "correlation: blend", "correlation: severity, worst kind", "within an item, worst kind"]
    rows: list[Row] = [["data", "score", *heads]]
    for cell, measured in kept("ambiguity").items():
        for score, name in names.items():
            of = measured["scores"][score]
            kinds = [kind for kind in measured["recall@1 by severity"] if kind != "blend"]
            worst = (max((way[kind] for kind in kinds), key=lambda one: one["mean"]) for way in (of, of["each item"]))
            figures = (f"{one['mean']:.2f} ± {one['std']:.2f}" for one in (of["auroc"], of["blend"], *worst))
            rows.append([REAL[cell] if score == "kappa" else "", name, *figures])
    return rows


@table
def doubt() -> list[Row]:
    """Correlation of each score with the doubt of five other networks, on real networks."""
    names = {
        "kappa_aleatoric": "**κ_a**",
        "kappa": "κ",
        "cosine": "first cosine",
        "votes": "votes of ten hits",
        "relative_mahalanobis": "relative Mahalanobis",
    }
    rows: list[Row] = [["data", *names.values()]]
    for cell, measured in kept("doubt").items():
        figures = [measured["correlations"][score] for score in names]
        rows.append([(REAL | REAL_HELD_OUT)[cell], *(f"{one['mean']:.2f} ± {one['std']:.2f}" for one in figures)])
    return rows


@table
def answer_cost() -> list[Row]:
    rows: list[Row] = [["decide from", "bare search, ms", "κ, ms", "decision, ms", "κ and decision over search"]]
    for name, row in read("answers")["cost"].items():
        rows.append(
            [name, *(f"{row[f'{part}_ms']:.2f}" for part in ("search", "kappa", "decide")), f"{row['ratio']:.3f}"]
        )
    return rows


# All systems on FashionMNIST against MNIST.

PLAIN_MEAN = "deep_ensemble, plain mean"
FIGURES = ("map@1", "map@5", "auroc", "auprc", "ausc", "ece_below_one")
PAPER: dict[str, tuple[float | None, ...]] = {  # Warburg et al. (2023), table 2
    "deterministic": (0.78, 0.73, None, None, None, None),
    PLAIN_MEAN: (0.69, 0.62, 0.41, 0.46, 0.61, 0.04),
    "pfe": (0.78, 0.74, 0.53, 0.46, 0.65, 0.26),
    "hib": (0.69, 0.63, 0.60, 0.60, 0.65, 0.54),
    "mc_dropout": (0.76, 0.71, 0.93, 0.93, 0.84, 0.03),
    "laplace_posthoc": (0.78, 0.74, 0.96, 0.96, 0.86, 0.03),
    "laplace_online": (0.81, 0.77, 0.98, 0.98, 0.89, 0.02),
}


def clothes(data: str = "fashionmnist") -> dict[str, dict[str, Any]]:
    """Results on FashionMNIST by method, the two posteriors first, for `over_seeds`."""
    measured = read(f"suite/{data}")
    order = dict.fromkeys(("laplace_online", "laplace_posthoc", *METHODS, PLAIN_MEAN))
    seeds = {name: dict(enumerate(measured[name].values())) for name in order if name in measured}
    return {name: {"seeds": rows, **summary(rows)} for name, rows in seeds.items()}


def system(name: str, results: dict[str, Any], figures: Sequence[str]) -> Row:
    """A row of a method, without figures of κ if it has no calibrated κ."""
    known = figures if "ece" in results["mean"] else [figure for figure in figures if figure.startswith("map")]
    cells = [spread(results, figure) if figure in known else NOTHING for figure in figures]
    return [f"{name} {seeds_of(results)}", *cells]


@table
def systems() -> list[Row]:
    figures = (*FIGURES, "ece")
    rows: list[Row] = [["method (seeds)", *names(figures)]]
    for name, results in clothes().items():
        rows.append(system(name, results, figures))
        if name in PAPER:
            rows.append(["*paper*", *(NOTHING if value is None else f"{value:.2f}" for value in (*PAPER[name], None))])
    return rows


# Post hoc on FashionMNIST.


@table
def reruns() -> list[Row]:
    def moved(pairs: Iterable[list[dict[str, float]]], figure: str) -> str:
        gaps = [abs(one[figure] - two[figure]) for one, two in pairs]
        return f"{sum(gaps) / len(gaps):.3f}, {max(gaps):.3f}"

    figures = ("recall@1", "auroc", "ausc", "ece")
    rows = [
        [f"{name} ({len(pairs)})", *(moved(pairs.values(), figure) for figure in figures)]
        for name, pairs in read("reruns").items()
        if name != "machine"
    ]
    return [["data (seeds)", *names(figures)], *rows]


@table
def altered_images() -> list[Row]:
    """AUROC of altered clothes, by the scores that flag."""
    results = read("altered_images")["fashionmnist"]
    kinds = (results["outside"], *MADE)
    scores = ("kappa", "variance", "norm", "knn", "mahalanobis", "relative_mahalanobis", "mahalanobis_knn", "cosine")
    rows = [[SCORES[key].short, *over_seeds(results, [f"{key}@{kind}" for kind in kinds])] for key in scores]
    return [["AUROC by", *kinds], *rows]


@table
def losses() -> list[Row]:
    figures = ("map@1", "auroc", "auroc_variance", "ausc", "ece")
    parts = {"contrastive": read("fashionmnist"), **read("fashionmnist_losses")}
    del parts["machine"]
    return [
        ["training loss (seeds)", *names(figures)],
        *([f"`{name}` ({len(part['seeds'])})", *over_seeds(part, figures)] for name, part in parts.items()),
    ]


@table
def variants() -> list[Row]:
    figures = ("map@1", "auroc", "auroc_variance", "ausc", "ece")
    parts = read("fashionmnist_variants")
    del parts["machine"]
    rows: list[Row] = [["split, fix", *names(figures), "entries clipped", "seconds"]]
    for name, part in parts.items():
        extra = f"{part['mean']['share_clipped']:.4f}", f"{part['mean']['seconds_curvature']:.0f}"
        rows.append([name, *over_seeds(part, figures), *extra])
    return rows


def over_runs(rows: list[dict[str, Any]], figure: str) -> str:
    """The mean over runs, and the standard deviation if there are several; a dash if a run lacks it."""
    values: list[Any] = [row.get(figure) for row in rows]
    if None in values:
        return NOTHING
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def of_structures() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The measured runs of each data set and variant."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for file, place in (("structures", ""), ("structures_gpu", ", GPU")):
        for name, part in read(file).items():
            if name != "machine":
                variants = found.setdefault(name.split("-")[0] + place, {})
                for key, row in part.items():
                    if key not in NO_STRUCTURE and "refused" not in row:
                        variants.setdefault(key, []).append(row)
    return found


@table
def structures() -> list[Row]:
    """By the contrastive curvature; a row is a mean over the runs of its data set."""
    figures = ("auroc", "ausc", "ece")
    titles = [describe(figure).name for figure in figures]
    rows: list[Row] = [["data (seeds)", "structure", *titles, "µs an item"]]
    for data, variants in of_structures().items():
        if data.endswith(("_supcon", "_contrastive", "GPU")):
            continue
        for key, runs in variants.items():
            curvature, _, structure = key.rpartition(" ")
            if not curvature.startswith("arccos") or structure == "ekfac" or key in NOT_SHOWN:
                continue
            setting = curvature.removeprefix("arccos").strip(", ")
            item = mean(row["microseconds_item"] for row in runs)
            title = f"`{structure}`" + (f", {setting}" if setting else "")
            if len(runs) > 1:  # differences between single seeds mean nothing
                cells = (over_runs(runs, figure) for figure in figures)
                rows.append([f"{data} ({len(runs)})", title, *cells, f"{item:.0f}"])
    return rows


@table
def supcon_structures() -> list[Row]:
    """The two curvatures on the same networks, the contrastive one first."""
    figures = {"auroc": "AUROC", "ausc": "AUSC"}
    curvatures = {"arccos": "contrastive", "SupCon logits": "SupCon"}
    heads = [f"{title}: {name}" for title in figures.values() for name in curvatures.values()]
    rows: list[Row] = [["data (seeds)", "structure", *heads]]
    for data in ("fashionmnist", "fashionmnist_supcon", "clinc150", "clinc150_contrastive"):
        variants = of_structures()[data]
        for structure in ("diag", "kron"):
            runs = [
                variants.get(f"{curvature}, {structure}") or variants.get(f"{curvature} {structure}")
                for curvature in curvatures
            ]
            if all(runs):
                cells = (over_runs(part or [], figure) for figure in figures for part in runs)
                rows.append([f"{data} ({len(runs[0] or [])})", f"`{structure}`", *cells])
    return rows


NOT_SHOWN = ("arccos, 865 images, all-layers-kron-sampled", "arccos, 865 images, α = 100, all-layers-diag-sampled")
"""Variants with the same message as others."""
NO_STRUCTURE = "layer", "items"
"""Fields of a run in the results of structures, besides the structures."""


@table
def images() -> list[Row]:
    """A folder of pictures, by network: recall, and the time of a run."""
    titles = {
        "default": "EfficientNet-Lite0, trained head",
        "identity": "EfficientNet-Lite0, as it is",
        "resnet18": "ResNet-18 from random weights",
    }
    figures = {"recall@1": 3, "recall@1_in_folder": 3, "ausc": 3, "seconds": 0, "processor_seconds": 0}
    rows: list[Row] = [
        ["network (seeds)", "recall@1", "recall@1 in the whole folder", "AUSC", "seconds", "processor seconds"]
    ]
    for network, title in titles.items():
        cells = [cell for name, cell in read("images").items() if name.split("/")[1] == network]
        if not cells:
            continue
        found = [[cell[figure] for cell in cells] for figure in figures]
        spread = (
            f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
            for values, digits in zip(found, figures.values(), strict=True)
        )
        means = (f"{mean(values):.{digits}f}" for values, digits in zip(found, figures.values(), strict=True))
        rows.append([f"{title} ({len(cells)})", *(a + b for a, b in zip(means, spread, strict=True))])
    return rows


@table
def supcon_settings() -> list[Row]:
    """Results on validation splits, over the runs with a setting."""
    figures = {"ausc": "AUSC", "ece": "ECE", "auroc_of_altered": "AUROC of altered images"}
    rows: list[Row] = [["curvature (seeds), on validation images", *figures.values()]]
    runs = [part for name, part in read("supcon_settings").items() if name != "machine"]
    for setting in dict.fromkeys(key for run in runs for key in run):
        if not re.fullmatch(r"contrastive|logits, τ = \S+", setting):
            continue
        measured = [run[setting] for run in runs if setting in run]
        title = setting if setting.startswith("contrastive") else f"SupCon {setting}"
        rows.append([f"{title} ({len(measured)})", *(over_runs(measured, figure) for figure in figures)])
    return rows


@table
def laplace_torch() -> list[Row]:
    """Speed-up over laplace-torch, by precision."""
    measured = {size: part for size, part in read("laplace_torch").items() if size != "machine"}
    rows: list[Row] = [["P, D", "structure", "fit", "fit, float64", "covariances", "covariances, float64"]]
    for size in (size for size in measured if f"{size}, float64" in measured and not re.search("1024|384", size)):
        for structure in ("diag", "kron"):
            parts = (measured[size][structure], measured[f"{size}, float64"][structure])
            ratios = (f"{part[what]['times_faster']:.3g} ×" for what in ("fit", "covariance") for part in parts)
            rows.append([re.sub("[PD] = ", "", size), f"`{structure}`", *ratios])
    return rows


@table
def authors_posterior() -> list[Row]:
    figures = ("auroc", "ausc", "ece", "ece_below_one")
    rows: list[Row] = [
        ["posterior", "mean precision", *names(figures), "weights clipped", "their share of the variance"]
    ]
    results = read("posthoc_rules_fashionmnist")
    for name, title in (("tuned", "tuned"), ("squared", "s = N²"), ("authors", "their sum")):
        means = results[name]["mean"]
        shares = f"{means['share_clipped']:.3f}", f"{means['variance_clipped']:.3f}"
        rows.append([title, f"{means['precision_of_data']:.1e}", *over_seeds(results[name], figures), *shares])
    return rows


@table
def definitions() -> list[Row]:
    results, figures = read("definitions_fashionmnist"), ("map@1", "auroc", "auprc", "ausc")
    rows: list[Row] = [["definitions", *names(figures), "ECE"]]
    for name, title, ece in (("ours", "here", "ece"), ("theirs", "theirs", "ece_below_one")):
        rows.append([title, *over_seeds(results[name], figures), *over_seeds(results["ours"], [ece])])
    return rows


# Online.

HELD_OUT = ("inverted", "permuted", "digits")


def _on_validation(heading: str, results: dict[str, Any], titles: dict[str, str]) -> list[Row]:
    figures = ("map@1", "ausc", "ece", *(f"auroc@{name}" for name in HELD_OUT))
    heads = [heading, *names(("map@1", "ausc", "ece")), "AUROC, inverted", "permuted", "digits"]
    rows = [[title, *(f"{results[name][figure]:.3f}" for figure in figures)] for name, title in titles.items()]
    return [heads, *rows]


@table
def online_curvature() -> list[Row]:
    titles = {"followed": "followed during training", "unbiased": "the same without its start", "refitted": "refitted"}
    return _on_validation("curvature", read("online_curvature")["mean"], titles)


@table
def online_settings() -> list[Row]:
    titles = {
        "n_samples=1": "one sample",
        "n_samples=4": "four samples",
        "n_samples=16": "sixteen samples",
        "likelihood_scale=3e6": "one sample, s = 3e6",
        "likelihood_scale=3e7": "one sample, s = 3e7",
        "memory_factor=0.99": "one sample, memory 0.99",
    }
    return _on_validation("change", read("online_settings")["mean"], titles)


@table
def online_cost() -> list[Row]:
    heads = ["deterministic steps", "online over deterministic, 1 sample (quartiles)", "4 samples (quartiles)"]
    rows: dict[str, tuple[list[str], list[str]]] = {}
    on_gpu = [
        {**case, "network": f"GPU: {case['network']}"}
        for case in read("online_gpu")["cases"]
        if case["precision"] == "32-true"
    ]
    for case in (*read("online")["cases"], *on_gpu):
        network = f"{case['network']}, D = {case['D']}, batch {case['batch']}"
        ratio = f"{case['ratio']:.3f} ({'–'.join(f'{end:.3f}' for end in case['ratio_quartiles'])})"
        steps, ratios = rows.setdefault(network, ([], []))
        steps.append(f"{case['deterministic_seconds']:.3f} s")
        ratios.append(ratio)
    return [["network", *heads], *([network, ", ".join(steps), *ratios] for network, (steps, ratios) in rows.items())]


# Other data, and what things cost.


# The suite: a row a method, a column a data set.

SUITE = (
    *("fashionmnist", "fashionmnist_4000", "photographs", "faces", "characters", "digits"),
    *("clinc150", "banking77", "docstrings"),
    *("clinc150_last", "banking77_last", "docstrings_last"),
)


SUITE_COLUMNS = ("fashionmnist_4000", "photographs", "faces", "characters", "digits", "banking77", "docstrings")
"""The data sets that have most methods; `systems` has all of FashionMNIST."""
DEFAULT_ROW = "laplace_posthoc, default"
"""The row of the present default posterior; `laplace_posthoc` itself is the paper's, `diag` with a prior of 1."""
WITHOUT_LABELS = ("simclr", "simsiam", "byol", "swav")


def suites() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The metrics of every seed, by data set and method."""
    files = {name: RESULTS / "suite" / f"{name}.json" for name in SUITE}
    read_all = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    return {
        name: {method: [*read_all[name][method].values()] for method in METHODS if method in read_all[name]}
        for name in read_all
    }


def by_method(figure: Callable[[dict[str, Any]], float | None], *, of_kappa: bool = True) -> list[Row]:
    """A figure of every method on every data set; figures of κ only if the method has a calibrated κ."""
    data = suites()
    rows: list[Row] = [["method", *SUITE_COLUMNS]]
    for method in METHODS:
        cells = []
        for methods in (data[name] for name in SUITE_COLUMNS):
            seeds = [row for row in methods.get(method, ()) if not of_kappa or row.get("ece") is not None]
            cells.append(over_values(map(figure, seeds)))
        if set(cells) != {NOTHING}:
            rows.append([f"`{method}`", *cells])
    return rows


def by_kappa(figure: str) -> list[Row]:
    """A figure by κ of every method that reads labels."""
    without = {f"`{name}`" for name in WITHOUT_LABELS}
    return [row for row in by_method(lambda row: row[figure]) if row[0] not in without]


def over_values(values: Iterable[float | None]) -> str:
    """Mean of the existing values and, if there are several, standard deviation."""
    there = [value for value in values if value is not None]
    deviation = f" ± {stdev(there):.2f}" if len(there) > 1 else ""
    return f"{mean(there):.2f}{deviation}" if there else NOTHING


def least_trend(row: dict[str, Any], score: str = "") -> float | None:
    """The largest rank correlation of κ, or of a score, with severity, over all kinds of corruption."""
    figures = (row.get(f"corruption_{kind}_trend{score}") for kind in (*KINDS, *TEXT_KINDS))
    return max((value for value in figures if value is not None), default=None)


@table
def suite_ausc() -> list[Row]:
    return [*by_kappa("ausc"), *(cheap("ausc", score) for score in ("cosine", "weighted_votes"))]


@table
def suite_auroc() -> list[Row]:
    return [*by_kappa("auroc"), *(cheap("auroc", score) for score in ("cosine", "knn"))]


@table
def suite_posteriors() -> list[Row]:
    """The paper's posterior and the default, on networks with the same settings and seeds, if both were measured."""
    figures = {"auroc": "AUROC of strangers", "ece": "ECE"}
    heads = [f"{title}: {name}" for title in figures.values() for name in ("paper's", "default")]
    rows: list[Row] = [["run (seeds)", *heads, "ECE by chance"]]
    for name in SUITE:
        results = read(f"suite/{name}")
        if DEFAULT_ROW in results:
            seeds = list(results[DEFAULT_ROW])
            before, now = ([results[row][seed] for seed in seeds] for row in ("laplace_posthoc", DEFAULT_ROW))
            cells = [spread_of([one[figure] for one in part], 3) for figure in figures for part in (before, now)]
            chance = spread_of([one["ece_by_chance"] for one in now], 3)
            rows.append([f"{name} ({len(seeds)})", *cells, chance])
    return rows


AMBIGUITY_ROW = "laplace_posthoc, ambiguity"
"""The row of runs with `--ambiguity.learn=true`; in their metrics, κ_e is the κ of runs without it."""


@table
def suite_ambiguity() -> list[Row]:
    """κ of small networks with learned ambiguity, beside κ_e and the first cosine."""
    scores = {"first cosine": "_cosine", "κ_e": "_kappa_epistemic", "κ": ""}
    rows: list[Row] = [["run (seeds)", *(f"{figure}: {score}" for figure in ("AUROC", "worst") for score in scores)]]
    for name in SUITE:
        seeds = list(read(f"suite/{name}").get(AMBIGUITY_ROW, {}).values())
        if seeds:
            cells = [over_values(one[f"auroc{score}"] for one in seeds) for score in scores.values()]
            trends = (over_values(least_trend(one, score) for one in seeds) for score in scores.values())
            rows.append([f"{name} ({len(seeds)})", *cells, *trends])
    return rows


@table
def suite_trend() -> list[Row]:
    """One method of each kind."""
    shown = ("knn_distance", "mcinfonce", "laplace_posthoc", "laplace_online")
    return [row for row in by_method(least_trend) if row[0] in {"method", *(f"`{name}`" for name in shown)}]


@table
def without_labels() -> list[Row]:
    """Quality of features and embeddings of the methods without labels, on clothes."""
    figures = ("recall@1", "knn_accuracy", "linear_probe", "nmi", "ari")
    rows: list[Row] = [["method (seeds)", *names(figures)]]
    for name in WITHOUT_LABELS:
        seeds = suites()["fashionmnist_4000"][name]
        rows.append([f"`{name}` ({len(seeds)})", *(over_values(row[figure] for row in seeds) for figure in figures)])
    return rows


def cheap(figure: str, score: str) -> Row:
    """A figure of a score that needs no posterior, on the networks of the post-hoc posterior."""
    rows = by_method(lambda row: row[f"{figure}_{score}"])
    return [f"*{SCORES[score].short}*", *next(row for row in rows if row[0] == "`laplace_posthoc`")[1:]]


@table
def suite_heads() -> list[Row]:
    """Figures of κ of the post-hoc posterior on texts, by the input of the head."""
    figures = {"recall@1": "recall@1", "ausc": "AUSC", "auroc": "AUROC by κ"}
    ends = {"": "all layers", "_last": "last layer"}
    heads = [f"{title}, {end}" for title in figures.values() for end in ends.values()]
    rows: list[Row] = [["data", *heads]]
    data = suites()
    for name in ("clinc150", "banking77", "docstrings"):
        of = [data[f"{name}{end}"]["laplace_posthoc"] for end in ends]
        rows.append([name, *(over_values(row[figure] for row in seeds) for figure in figures for seeds in of)])
    return rows


@table
def unseen() -> list[Row]:
    """Results on classes outside training: `suite.py --strangers 0.5`."""
    figures = {"unseen_recall@1": "recall@1", "r_auroc@unseen": "R-AUROC by κ"}
    figures |= {f"r_auroc_{score}@unseen": f"by {SCORES[score].short}" for score in ("cosine", "weighted_votes")}
    rows: list[Row] = [["data", "method (seeds)", *figures.values()]]
    for name in (name for name in SUITE if (RESULTS / "suite" / f"{name}_unseen.json").is_file()):
        measured = read(f"suite/{name}_unseen")
        for method in ("laplace_posthoc", "mcinfonce", "elk", "deep_ensemble"):
            if seeds := [*measured.get(method, {}).values()]:
                cells = (over_values(row.get(key) for row in seeds) for key in figures)
                rows.append([name, f"`{method}` ({len(seeds)})", *cells])
    return rows


@table
def recovered_posteriors() -> list[Row]:
    """Results of `lam experiment posterior-recovery` in the longer runs."""
    columns = ["rank correlation of μ", "rank correlation of κ", "κ̂ over κ"]
    rows: list[Row] = [["D", "κ", "loss", "batches × pairs", "rate", *columns]]
    for run in read("posterior_recovery")["runs"]:
        settings = run["settings"]
        if settings["n_batches"] in range(4000) or settings["n_batches"] == 5000:
            continue
        counts = [f"{settings['n_batches']:,} × {settings['batch_size']}", f"{settings['learning_rate']:g}"]
        low, high = settings["ambiguity"]
        for row in run["rows"]:
            cells = [NOTHING if row.get(column) is None else f"{row[column]:.3g}" for column in columns]
            rows.append([str(settings["dimension"]), f"{low:g}–{high:g}", row["loss"], *counts, *cells])
    return rows


@table
def recovered_latents() -> list[Row]:
    """Results of `lam experiment aninfonce-latents`."""
    columns = ["R² of style", "R² of content", "largest error of Λ"]
    rows: list[Row] = [["Λ₁ and Λ₂", "pairs", "negatives", "loss", "batches", *columns]]
    for run in read("aninfonce_latents")["runs"]:
        settings = run["settings"]
        concentrations = f"{settings['style']:g}, {settings['content']:g}"
        pairs = "one way" if settings["ways"] == 1 else "two ways"
        negatives = "any"
        if settings["n_hard"]:
            others = settings.get("others", False)  # before there was a choice, near ones were all there are
            near = f"{settings['n_hard']} near, Λ⁻ = {settings['hard']:g}"
            negatives = f"any and {near}" if others else f"{near}, alone"
            if settings.get("hard_from"):
                negatives += f", after {settings['hard_from']:,} batches"
        for row in run["rows"]:
            loss = f"infonce, τ = {settings['temperature']:g}" if row["loss"] == "infonce" else row["loss"]
            cells = [NOTHING if row[column] is None else f"{row[column]:.3g}" for column in columns]
            rows.append([concentrations, pairs, negatives, loss, f"{settings['n_batches']:,}", *cells])
    return rows


def experiment_rows(name: str, keys: Sequence[str], figures: dict[str, int]) -> list[Row]:
    """Mean ± standard deviation over seeds of an experiment on images, with a row for each value of the keys."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in read(name)["runs"]:
        settings = run["settings"]
        data = settings["data"] + (f", {settings['limit']:,}" if settings["limit"] else "")
        for row in run["rows"]:
            cells = (NOTHING if row[key] is None else row[key] for key in keys)
            rounded = (f"{cell:.0f}" if isinstance(cell, float | int) else cell for cell in cells)
            found.setdefault((data, *rounded), []).append(row)
    rows = []
    for key, of_seeds in found.items():
        cells = []
        for figure, digits in figures.items():
            values: list[Any] = [row.get(figure) for row in of_seeds]
            known = all(value is not None for value in values)
            spread = f" ± {stdev(values):.{digits}f}" if known and digits and len(values) > 1 else ""
            cells.append(f"{mean(values):.{digits}f}{spread}" if known else NOTHING)
        rows.append([f"{key[0]} ({len(of_seeds)})", *key[1:], *cells])
    return rows


@table
def varcon_accuracy() -> list[Row]:
    """Results of `lam experiment varcon-accuracy`."""
    keys = ["loss", "batch", "images a class"]  # the page has batches of 64, so it leaves out the column
    figures = {"linear probe": 3, "k-NN, 5": 3, "NMI": 3, "under corruption": 3}
    rows = experiment_rows("varcon_accuracy", keys, figures)
    shown = [row for row in rows if row[2] == "64" and row[3] != "20"]
    return [["data (seeds)", "loss", "images a class", *figures], *([*row[:2], *row[3:]] for row in shown)]


@table
def explicit_concentration() -> list[Row]:
    """Results of `lam experiment explicit-concentration` on digits."""
    keys = ["base", "κ"]
    figures = {"linear probe": 3, "k-NN": 3, "correlation with severity": 2, "AUROC of wrong": 2}
    rows = experiment_rows("explicit_concentration", keys, figures)
    return [[*keys, *figures], *(row[1:] for row in rows if row[0] == "digits (3)")]


def of_tables(title: str, keys: Sequence[str]) -> dict[tuple[str, ...], dict[str, list[float]]]:
    """Figures by seed from a table of runs of `lam experiment explicit-concentration` on digits, by keys."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for run in read("explicit_concentration")["runs"]:
        for row in run["tables"][title] if run["settings"]["data"] == "digits" else ():
            figures = found.setdefault(tuple(row[key] for key in keys), {})
            for name in row.keys() - set(keys):
                figures.setdefault(name, []).append(row[name])
    return found


@table
def explicit_kinds() -> list[Row]:
    """Whether κ falls with each kind of corruption, by regulariser, over the bases and seeds."""
    found = of_tables("Rank correlation of severity and mean κ, by kind of corruption", ["kind"])
    regularisers = ("square", "likelihood")
    rows: list[Row] = [["kind", *regularisers]]
    for (kind,), figures in found.items():
        values = (
            [value for base in ("simclr", "simsiam", "byol", "swav") for value in figures[f"{base}, {regulariser}"]]
            for regulariser in regularisers
        )
        rows.append([kind, *(f"{mean(of):+.2f} ± {stdev(of):.2f}" for of in values)])
    return rows


@table
def training_losses() -> list[Row]:
    """Time of a step by each loss for every second batch size, over pytorch-metric-learning's if its loss fits."""
    results = read("losses")
    kinds = {"infonce": "InfoNCE", "aninfonce": "AnInfoNCE", "supcon": "SupCon", "varcon": "VarCon"}
    head = ["batch", *(f"{title}, ms (over PML's)" for title in kinds.values())]
    rows: list[Row] = [head]
    for case in results["rows"][::2]:
        cells = []
        for kind in kinds:
            ratio = case["ratio_to_pml"].get(kind)
            milliseconds = 1000 * case["seconds"][kind]
            shown = f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
            cells.append(f"{shown} ({NOTHING if ratio is None else f'{ratio:.2g}'})")
        rows.append([f"{case['batch']:,}", *cells])
    rows.append(["growth, as a power of the batch", *(f"{results['growth'][kind]:.1f}" for kind in kinds)])
    return rows


@table
def curvature() -> list[Row]:
    heads = ["N, D, P", "pairs", "arccos fixed", "arccos full", "300 pairs, one at a time"]
    rows: list[Row] = [[*heads, "slower: one pair at a time", "slower: BackPACK"]]
    for case in read("ggn")["all_pairs"]:
        times, alone = case["milliseconds"], case["one_pair_at_a_time_milliseconds_for_300"]["arccos fixed"]
        seconds = [
            f"{value:.2g} ms" if value < 10 else f"{value:.0f} ms"
            for value in (times["arccos fixed"], times["arccos full"], alone)
        ]
        ratios = f"{case['ratio_one_pair_at_a_time']['arccos fixed']:,.0f} ×", f"{case['ratio_backpack']:.1f} ×"
        rows.append([f"{case['N']}, {case['D']}, {case['P']}", f"{case['ordered_pairs']:,}", *seconds, *ratios])
    return rows


@table
def curvature_size() -> list[Row]:
    results = read("ggn")
    memory, data = results["memory"], results["data_set"]
    most = max(variant["mebibytes"] for variant in memory["variants"].values())
    return [
        ["what", "N, D, P", "measured"],
        ["memory, the largest of the six variants", f"{memory['N']}, {memory['D']}, {memory['P']}", f"{most:.0f} MiB"],
        [
            f"all {data['unordered_pairs']:,} pairs, exactly",
            f"{data['N']}, {data['D']}, {data['P']}",
            f"{data['seconds_margin_0.7']:.0f} s",
        ],
    ]


@table
def infonce_cost() -> list[Row]:
    results = read("infonce")
    other = "as published" if results["published"] else "matrices for every image"
    rows: list[Row] = [["images and texts", "ours", other, "time over ours", "memory over ours"]]
    for case in results["float32"][::2]:
        forms = [_cost(form["seconds"], form["mebibytes"]) for form in (case["ours"], case["matrices"])]
        forms[1] += " (by formula)" if case["matrices"]["by"] == "formula" else ""
        ratios = (f"{case['ratio'][key]:.0f} ×" for key in ("seconds", "mebibytes"))
        rows.append([f"{case['B']:,}", *forms, *ratios])
    return rows


def _cost(seconds: float, mebibytes: float) -> str:
    return f"{seconds:.0f} s, {mebibytes:,.0f} MiB" if seconds > 10 else f"{seconds:.2g} s, {mebibytes:,.0f} MiB"


@table
def embedding_cost() -> list[Row]:
    rows: list[Row] = [["network", "batch", "forward pass", "κ alone", "embedding over forward pass (range)"]]
    for case in read("embed")["cases"]:
        times = (f"{1000 * case[f'{part}_seconds']:.1f} ms" for part in ("forward", "kappa_alone"))
        ratio = f"{case['ratio_embed_to_forward']:.2f} ({'–'.join(f'{end:.2f}' for end in case['ratio_range'])})"
        rows.append([f"{case['network']}, D = {case['D']}", str(case["batch"]), *times, ratio])
    return rows


@table
def on_a_gpu() -> list[Row]:
    """GPU measurements, without online training and the structures."""
    ggn, layers = read("ggn_gpu"), read("gpu")["all_layers"]
    rows: list[Row] = [["what", "size, or N, D, P", "measured"]]
    for case in ggn["all_pairs"]:
        times = [f"{fix} {case['milliseconds'][f'arccos {fix}']:.1f} ms" for fix in ("fixed", "full")]
        times.append(f"BackPACK {case['backpack_milliseconds']:.1f} ms")
        size = f"{case['N']}, {case['D']}, {case['P']}"
        rows.append(["curvature of a batch", size, ", ".join(times)])
    for case in (ggn["data_set"], ggn["a_million"]):
        size = f"{case['N']}, {case['D']}, {case['P']}"
        rows.append(["curvature of all pairs", size, f"{case['seconds_margin_0.7']:.2g} s"])
    for case in layers[:2]:
        size = f"D = {case['D']}, {case['pixels']}² pixels, {case['images']} images"
        times = f"{case['seconds']:.1f} s, {case['peak_gibibytes']:.0f} GiB"
        times += f"; κ {case['embed_seconds_an_image']:.2f} s an image"
        rows.append([f"curvature of all {case['weights']:,} weights of ResNet-50", size, times])
    for case in read("embed_gpu")["cases"]:
        times = [f"{1000 * case[part]:.2g} ms" for part in ("forward_seconds", "kappa_alone_seconds")]
        size = f"{case['network']}, D = {case['D']}, batch {case['batch']}"
        rows.append(["embedding, 32 samples", size, f"forward pass {times[0]}, κ {times[1]}"])
    return rows


@table
def gallery_cost() -> list[Row]:
    results = read("gallery")
    rows: list[Row] = [["items are", "index and JSON file", "gallery", "ratio of gallery to JSON (range)"]]
    titles = {
        "replaced": "replaced by others",
        "same": "written again, the same",
        "search": "opened, and searched once",
    }
    for key, title in titles.items():
        measured = (f"{results[name][key]:,.1f} s" for name in ("plain", "lam"))
        ends = "–".join(f"{end:.2f}" for end in results["ratio_range"][key])
        rows.append([title, *measured, f"{results['ratio'][key]:.2f} ({ends})"])
    return rows


@table
def pretrained() -> list[Row]:
    figures = ("recall@1", "ausc", "ece", "auroc_kappa", "auroc_knn")
    rows: list[Row] = [
        ["head", *names(figures[:3]), "AUROC by κ", "by k-NN", "cosine of samples' mean and own direction"]
    ]
    runs = read("pretrained")["runs"]
    for head, split, fix in dict.fromkeys((run["head"], run["split"], run["fix"]) for run in runs):
        parts = [run for run in runs if (run["head"], run["split"], run["fix"]) == (head, split, fix)]
        spread = [f"{mean(p[name] for p in parts):.3f} ± {stdev(p[name] for p in parts):.3f}" for name in figures]
        cosine = f"{mean(part['cosine_of_samples'] for part in parts):.3f}"
        rows.append([f"`{head}`, {split} {fix}", *spread, cosine])
    return rows


# Calibration.

FLAGS = {"kappa": "κ", "knn": "k-NN distance", "cosine": "cosine"}
FLAGS |= {COMBINED: "combined"}


def calibrated() -> dict[str, Any]:
    return read("calibration")["mean"]


def rate(row: dict[str, Any]) -> Row:
    return [f"{row['target']:g}", f"{row['mean']:.4f} ± {row['standard_error']:.4f}"]


@table
def false_flags() -> list[Row]:
    rows: list[Row] = [["flag", "false flags", "spread", "spread in theory"]]
    for row in calibrated()["false_flags"]:
        spread = (f"{row[name]:.4f}" for name in ("standard_deviation", "standard_deviation_by_law"))
        if row["target"] == 0.05:
            rows.append([FLAGS[row["flag"]], rate(row)[1], *spread])
    return rows


@table
def false_accepts() -> list[Row]:
    rows: list[Row] = [["target", "false accepts", "interval covers", "in theory"]]
    for row in calibrated()["false_accepts"]:
        rows.append([*rate(row), *(f"{row[name]:.3f}" for name in ("interval_holds", "interval_holds_by_law"))])
    return rows


@table
def no_match() -> list[Row]:
    rows: list[Row] = [["flagged by", "FashionMNIST flagged", "MNIST flagged", "MNIST answered `match`"]]
    for row in calibrated()["no_match"]:
        shares = f"{row['fashionmnist_flagged']:.3f}", f"{row['mnist_flagged']:.3f}"
        rows.append([FLAGS[row["score"]], *shares, f"{row['mnist_answered_match_at_far_0.01']:.4f}"])
    return rows


@table
def verification() -> list[Row]:
    heads = [
        "false accepts, by random splits",
        "false accepts, by the validation split",
        "true accepts, by the validation split",
    ]
    rows: list[Row] = [["target", *heads]]
    for row in calibrated()["verification"]["rates"]:
        rows.append([*rate(row), f"{row['of_validation']:.4f}", f"{row['true_accepts_of_validation']:.3f}"])
    return rows


@table
def probability() -> list[Row]:
    right, cells = calibrated()["p_correct"], []
    titles = {
        "same_gallery": "with the gallery of the calibration",
        "stale": "with a larger gallery, not calibrated again",
        "calibrated_again": "with the larger gallery, calibrated again",
    }
    for key, title in titles.items():
        cells.append([title, f"{right[f'gallery_size_{key}']:,.0f}", f"{right[f'ece_{key}']:.3f}"])
    return [
        ["probability", "items", "ECE"],
        *cells,
        ["of a pair", NOTHING, f"{calibrated()['verification']['ece']:.3f}"],
    ]


@table
def strangers() -> list[Row]:
    sources = ("known classes", "strangers")
    heads = [f"{what}, calibrated on {source}" for source in sources for what in ("above", "answered")]
    rows: list[Row] = [["target", *heads]]
    for row in read("strangers")["rates"]:
        shares = (
            f"{row[name]['mean']:.3f} ± {row[name]['std']:.3f}"
            for source in ("known_classes", "strangers")
            for name in (f"accepted_learnt_from_{source}", f"answered_match_learnt_from_{source}")
        )
        rows.append([f"{row['target']:g}", *shares])
    return rows


@table
def strangers_of_classes() -> list[Row]:
    heads = ["data (splits)", "held out", "rate promised"]
    heads += ["above, calibrated on known classes", "above, calibrated on held-out classes"]
    known = {"known above": "answered_lam", "known above, plain cosine": "answered_plain"}
    rows: list[Row] = [[*heads, "splits inside", *known]]
    intents, runs = read("intents"), read("strangers")
    texts = {name: intents[f"strangers_{name}"] for name in ("clinc150", "banking77")}
    for name, row in {**texts, **{name: runs[name] for name in ("characters", "faces")}}.items():
        n, mean_of = len(row["seeds"]), row["mean"]
        cells = [f"{name} ({n})", f"{mean_of['classes']:.0f}", f"{mean_of['promised']:.3f}"]
        cells += [spread(row, f"false_accepts_{source}") for source in ("of_known_classes_alone", "lam")]
        cells.append(f"{row['inside_false_accepts']}/{n}")
        rows.append([*cells, *(spread(row, figure) for figure in known.values())])
    return rows


@table
def setting_aside() -> list[Row]:
    rows: list[Row] = [["recall@1 (seeds)", "trained intents", "intents held out", "the same intents, trained"]]
    for name in ("clinc150", "banking77"):
        row = read("intents")[f"cost_of_setting_aside_{name}"]
        known, aside, all_of = (
            f"recall_{end}" for end in ("known_without_strangers", "aside_without_strangers", "aside_all")
        )
        rows.append([f"{name} {seeds_of(row)}", *(spread(row, figure) for figure in (known, aside, all_of))])
    return rows


# Unknown intents.


@table
def out_of_scope() -> list[Row]:
    results = read("intents")["out_of_scope"]
    of = f"CLINC150 ({len(results['seeds'])} seeds, {results['mean']['seconds']:.0f} s of a core each)"
    rows: list[Row] = [[of, "AUROC", "AUPRC", "ECE", "ECE with out of scope"]]
    titles = {
        COMBINED: "**combined**, lam's flag",
        "p_right": "**P(right)**, half strangers expected",
        "p_right_expecting_strangers": "**P(right)**, 5 % strangers expected",
    }
    for name in ("kappa", "knn", "relative_mahalanobis", "cosine", "mean_cosine", "weighted_votes", *titles):
        figures = [f"{figure}_{name}" for figure in ("auroc", "auprc", "ece", "ece_with_out_of_scope")]
        title = titles.get(name) or SCORES[name].short
        rows.append([title, *over_seeds({**results, "mean": {**dict.fromkeys(figures), **results["mean"]}}, figures)])
    rows.append(["SNGP on BERT, published", "0.969", "0.908", NOTHING, "0.080"])
    rows.append(["its ensemble, published", "0.973", "0.910", NOTHING, "0.064"])
    return rows


@table
def text_layers() -> list[Row]:
    """A head on the embedding of a frozen encoder, and a head on all its layers."""
    ends = [(figure, layers) for figure in ("recall@1", "auroc") for layers in ("last", "all")]
    rows: list[Row] = [["data (seeds)", *(f"{DESCRIBED[figure]}, {layers}" for figure, layers in ends)]]
    whole = {f"layers_{name}": name for name in ("clinc150", "banking77", "docstrings")}
    parts = {f"few_{name}": f"{name}, 30 intents, 10 questions each" for name in ("clinc150", "banking77")}
    for key, title in {**whole, **parts}.items():
        row = read("intents")[key]
        rows.append([f"{title} {seeds_of(row)}", *(spread(row, f"{figure}_{layers}") for figure, layers in ends)])
    return rows


@table
def text_losses() -> list[Row]:
    """The gain of a head over the plain embedding, by training loss."""
    by = {"plain": "no head", "contrastive": "head by the contrastive loss", "supcon": "head by SupCon"}
    rows: list[Row] = [["recall@1 (seeds)", *by.values()]]
    for name in ("clinc150", "banking77", "docstrings"):
        row = read("intents")[f"losses_{name}"]
        rows.append([f"{name} {seeds_of(row)}", *(spread(row, f"recall@1_{key}") for key in by)])
    return rows


DESCRIBED = {"recall@1": "recall@1", "auroc": "AUROC of strangers"}
PUBLISHED_OPEN = {
    "clinc150": {0.25: (91.8, 94.5), 0.5: (88.9, 90.6), 0.75: (88.5, 85.9)},
    "banking77": {0.25: (85.7, 89.9), 0.5: (83.8, 83.9), 0.75: (84.4, 73.1)},
}
"""Accuracy and F1 of the open class in percent, by share of known intents: the best rows of Adaptive-Boundary."""


@table
def open_intents() -> list[Row]:
    results = read("intents")
    heads = ["accuracy", "F1 of the unknown", "best published accuracy", "F1"]
    rows: list[Row] = [["data (splits)", "intents known", *heads]]
    for name, shares in PUBLISHED_OPEN.items():
        for share, published in shares.items():
            row = results[f"open_intent_{name}_{share}"]
            ours = [f"{100 * row['mean'][f]:.1f} ± {100 * row['std'][f]:.1f}" for f in ("accuracy", "f1_open")]
            rows.append([f"{name} ({len(row['seeds'])})", f"{share:.0%}", *ours, *map(str, published)])
    return rows


# Faults, mutants, loads.


@table
def faults() -> list[Row]:
    checks = read("faults")["checks"]
    rows: list[Row] = [["fault", "larger count: passed, unless it says otherwise"]]
    for one in yaml.safe_load((ROOT / "benchmarks" / "faults.yaml").read_text(encoding="utf-8")):
        if "full" not in one:
            continue
        named = [f"tests.{test.replace('.py::', '.').replace('/', '.')}" for test in one["full_tests"]]
        ran = [checks[name] for name in named if name in checks]
        passed, failed = (sum(check[ending] for check in ran) for ending in ("passed", "failed"))
        record = f"{passed} passed, {failed} missed" if failed else "passed" if ran else "none"
        rows.append([one["fault"], one["full"] + ("" if record == "passed" else f": {record}")])
    return rows


@table
def crowds() -> list[Row]:
    heads = [
        "1,100 connections from eight addresses",
        "health checks answered",
        "p99 of health checks",
        "p99 alone",
        "added memory",
    ]
    rows: list[Row] = [heads]
    titles = {
        "closed": "are closed by their clients at once",
        "idle": "are idle",
        "unread": "do not read",
        "dripped": "drip a body",
        "chunks": "send floods of small chunks",
        "upgraded": "ask for HTTP/2",
        "pings": "begin HTTP/2, with PINGs",
    }
    checks = read("faults")["checks"]
    crowd = checks["tests.service.test_crowds.test_a_crowd_of_1100_shuts_nobody_out"]["measured"]
    for name, row in crowd.items():
        way, addresses = re.fullmatch(r"(\w+), of (\d+) addresses", name).groups()  # type: ignore[union-attr]
        if addresses != "1":
            rows.append([titles[way], *_beside(row)])
    traffic = checks["tests.service.test_crowds.test_good_requests_among_bad_ones_are_answered_for_minutes"]["measured"]
    minutes = f"all of these beside good requests, {traffic['traffic']['seconds'] / 60:.0f} minutes"
    return [*rows, [minutes, *_beside(traffic["traffic"])]]


def _beside(row: dict[str, Any]) -> Row:
    asked, answered = sum(row["health"].values()), row["health"].get("200", 0)
    times = (f"{row[name]:.0f} ms" for name in ("health_p99_ms", "health_p99_ms_alone"))
    return [f"{answered:,} of {asked:,}", *times, f"{row['memory_mib']:.0f} MiB"]


@table
def loads() -> list[Row]:
    now = read("service")
    rows: list[Row] = [["work", "target", "measured: rate, p50, p99", "during churn"]]
    asked = {
        "vector_flat": ("vector query, Flat", "p99 ≤ 100 ms, no error"),
        "vector_hnsw": ("vector query, HNSW32", "p99 ≤ 50 ms, recall@10 ≥ 0.95"),
        "image_resnet50": ("image query, ResNet-50", "p99 ≤ 300 ms"),
        "image_resnet50_overload": ("image overload, ResNet-50", "≥ 12/s served, p99 ≤ 2 s, 503 within 50 ms"),
    }
    for name, (title, target) in asked.items():
        measured = now[name]
        rows.append(
            [
                f"{title}, {measured['asked_per_second']:g}/s",
                target,
                _load(measured),
                _load(measured["beside_churn"]),
            ]
        )
    loops = [(row, row["kind"]) for row in now["closed_loop"] if row["clients"] == 32]
    loops += [
        (now["image_resnet50_64_clients"], "image, ResNet-50"),
        (now["churn"], "`/v1/health` on connections that clients close"),
    ]
    return [
        *rows,
        *([f"{kind}, {row['clients']} clients in a loop", NOTHING, _load(row), NOTHING] for row, kind in loops),
        *(
            [f"{row['kind']}, 64 in a request", "≥ 10 × one at a time", _batched(row), NOTHING]
            for row in now["batches"]["rows"]
            if row["items"] == now["items"]
        ),
    ]


def _batched(row: dict[str, Any]) -> str:
    return f"{row['batched_per_second']:.0f}/s, {row['ratio']:.1f} ×"


def _load(row: dict[str, Any]) -> str:
    refused = row["statuses"].get("503", 0)
    parts = [f"{row['served_per_second']:g}/s", f"{row['p50_ms']:.0f} ms", f"{row['p99_ms']:.0f} ms"]
    if refused:
        parts.append(f"{refused}/{sum(row['statuses'].values())} refused, within {row['refused_p99_ms']:.0f} ms")
    return ", ".join(parts)


@table
def beside_faiss() -> list[Row]:
    measured = read("service")["beside_faiss"]
    rows: list[Row] = [["clients", "exact", "along a graph"]]
    for exact, graph in zip(measured["flat"], measured["hnsw"], strict=True):
        cells = [f"{row['served_per_second']:.0f}/s, {row['ratio']:.2f}" for row in (exact, graph)]
        rows.append([str(exact["clients"]), *cells])
    return rows


@table
def search_alone() -> list[Row]:
    now = read("service")
    rows: list[Row] = [["index alone", "measured"]]
    rows += [
        [f"speed over bare FAISS, {one['batch']} a batch", f"{one['index_ratio']:.2f}"] for one in now["search_alone"]
    ]
    kinds = {"flat_seconds_until_ready": "ready after, Flat", "hnsw_seconds_until_ready": "ready after, HNSW32"}
    rows += [[title, f"{now[key]:.1f} s"] for key, title in kinds.items()]
    return [*rows, ["recall@10, HNSW32", f"{now['hnsw_recall_at_10']:.3f}"]]


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""The pages: their commands, options and tests exist, their figures are those of the results. See `test_examples`."""

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lam.cli import RUNS, _parser
from lam.retrieval import METRICS, SCORES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RESULTS = ROOT / "benchmarks" / "results"


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def options() -> dict[str, set[str]]:
    """The options of each command."""
    (commands,) = [action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: set(command._option_string_actions) for name, command in commands.choices.items()}


def commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text(page), flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip() for language, block in blocks if not language for line in block.splitlines()]
    lines += [" ".join(words.split()) for words in re.findall(r"`(lam [a-z]+ [^`]+)`", text(page))]
    found = [shlex.split(line, comments=True) for line in lines if re.match(r"(\.venv/bin/)?lam ", line)]
    return [words[1:] for words in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page: Path) -> None:
    known = options()
    for command, *words in commands(page):
        assert command in known, command
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("-") and not (command in RUNS and "." in name):
                assert name in known[command] | ({"--output"} if command in RUNS else set()), f"lam {command} {name}"


def test_there_are_commands_to_check() -> None:
    named = {command for page in PAGES for command, *_ in commands(page)}
    assert {"run", "sweep", "compare", "embed", "index", "search", "calibrate", "serve"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_exist(page: Path) -> None:
    from lam.runs.config_files import describe_settings

    described = describe_settings()
    for name in re.findall(r"`((?:method|training|data)\.[a-z_]+)`", text(page)):
        assert name in described, name


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"^  - .+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(navigation) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_pages(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text(page)):
        assert (DOCS / target).is_file(), target


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text(DOCS / "operating.md"))
    assert len(named) > 30
    for path, name in named:
        assert f"def {name}(" in text(ROOT / path), name


def test_metrics_and_scores_are_those_that_are_measured() -> None:
    page = text(DOCS / "results.md")
    metrics = {
        f"| {metric.name} | `{key}` | {metric.reading.partition(' ')[0]} | {metric.meaning} |"
        for key, metric in METRICS.items()
        if metric.function is not None and not key.endswith(("@1", "@5"))
    }
    scores = {f"| {score.name} | `{key}` | {score.meaning} |" for key, score in SCORES.items()}
    section = page.partition("## Metrics and scores")[2].partition("## Definitions")[0]
    heads = {"| metric | key | better | what it says |", "| score | key | what it says where it is high |"}
    rows = {line for line in section.splitlines() if line.startswith("| ")} - heads
    assert rows - {"| --- | --- | --- | --- |", "| --- | --- | --- |"} == metrics | scores


def test_what_is_called_recorded_is() -> None:
    checks = json.loads(text(RESULTS / "faults.json"))["checks"]
    table = text(DOCS / "operating.md").splitlines()
    rows = [row for row in table if row.endswith("| recorded |") and "tests/" in row]
    assert rows
    for row in rows:
        *_, each_time, full, _, _ = row.split("|")
        pattern = r"`(tests/[\w/]+)\.py::(\w+)`"
        named = re.findall(pattern, full) or re.findall(pattern, each_time)  # of one name, where it has two counts
        assert named, row
        for path, name in named:
            found = checks[f"{path.replace('/', '.')}.{name}"]
            assert found["passed"] > 0
            assert found["failed"] == 0


@pytest.mark.parametrize(("file", "ratio"), [("service", "index_ratio"), ("service_hypercorn", "ratio")])
def test_loads_are_those_that_were_measured(file: str, ratio: str) -> None:
    measured, page = json.loads(text(RESULTS / f"{file}.json")), " ".join(text(DOCS / "operating.md").split())
    for name in ("vector_flat", "vector_hnsw", "image_resnet50", "image_resnet50_overload"):
        row = measured[name]
        for one in (row, row.get("beside_churn", row)):
            assert f"{one['served_per_second']:g}/s served, p99 {one['p99_ms']:.0f} ms" in page, name
    more = [measured[name] for name in ("churn", "image_resnet50_64_clients") if name in measured]
    for row in [*measured["closed_loop"], *more]:
        shown = f"{row['served_per_second']:g}/s, p50 {row['p50_ms']:.0f} ms, p99 {row['p99_ms']:.0f} ms"
        assert shown in page, row
    assert ", ".join(f"{row[ratio]:.2f} at {row['batch']}" for row in measured["search_alone"]) in page
    assert f"a load of {measured['machine']['load']})" in page


def test_rates_are_those_that_were_measured() -> None:
    mean, page = json.loads(text(RESULTS / "calibration.json"))["mean"], text(DOCS / "calibrating.md")
    for row in [*mean["false_flags"], *mean["false_accepts"]]:
        assert f"| {row['target']:g} | {row['mean']:.4f} ± {row['standard_error']:.4f} |" in page, row
    for row in mean["no_match"]:
        shares = f"{row['fashionmnist_flagged']:.3f} | {row['mnist_flagged']:.3f}"
        assert f"| {shares} | {row['mnist_answered_match_at_far_0.01']:.4f} |" in page, row
    for row in mean["verification"]["rates"]:
        rate = f"| {row['target']:g} | {row['mean']:.4f} ± {row['standard_error']:.4f} | {row['of_validation']:.4f} |"
        assert f"{rate} {row['true_accepts_of_validation']:.3f} |" in page, row
    assert f"probability of a pair is {mean['verification']['ece']:.3f}" in page
    for name in ("ece_same_gallery", "ece_stale", "ece_calibrated_again"):
        assert f"{mean['p_correct'][name]:.3f}" in page, name


def test_strangers_are_those_that_were_measured() -> None:
    page = text(DOCS / "calibrating.md")
    for row in json.loads(text(RESULTS / "strangers.json"))["rates"]:
        shares = [
            f"{row[name]['mean']:.3f} ± {row[name]['std']:.3f}"
            for source in ("known_classes", "strangers")
            for name in (f"accepted_learnt_from_{source}", f"answered_match_learnt_from_{source}")
        ]
        assert f"| {row['target']:g} | {' | '.join(shares)} |" in page


def over_seeds(results: dict[str, Any], figure: str) -> str:
    return f"{results['mean'][figure]:.3f} ± {results['std'][figure]:.3f}"


def test_the_authors_rule_makes_what_was_measured() -> None:
    page = text(DOCS / "results.md")
    images, digits = (json.loads(text(RESULTS / f"posthoc_rules_{name}.json")) for name in ("fashionmnist", "digits"))
    parts = [("digits", 865, digits), ("FashionMNIST", 12000, images), ("FashionMNIST", 55000, images)]
    for name, n_images, found in parts:
        over = [f"{row[str(n_images)]:,.0f}" for row in found["authors_scale_is_squared_over"].values()]
        assert f"| {name} | {n_images:,} | {', '.join(over)} |" in page
    figures = ("map@1", "auroc", "ausc", "ece", "ece_below_one", "share_clipped", "variance_clipped")
    for name in ("tuned", "squared", "authors"):
        cells = [f"{images[name]['mean']['precision_of_data']:.1e}"]
        cells += [over_seeds(images[name], figure) for figure in figures[:-2]]
        cells += [f"{images[name]['mean'][figure]:.3f}" for figure in figures[-2:]]
        assert f" | {' | '.join(cells)} |" in page, name


def test_definitions_make_what_was_measured() -> None:
    page, found = text(DOCS / "results.md"), json.loads(text(RESULTS / "definitions_fashionmnist.json"))
    for name, ece in (("ours", "ece"), ("theirs", "ece_below_one")):
        cells = [over_seeds(found[name], figure) for figure in ("map@1", "auroc", "auprc", "ausc")]
        assert f"| {' | '.join([*cells, over_seeds(found['ours'], ece)])} |" in page, name


def test_the_readme_has_the_table_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import table  # pyright: ignore[reportMissingImports]

    assert table.table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_other_data_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import table  # pyright: ignore[reportMissingImports]

    assert table.other_data() in text(DOCS / "results.md")

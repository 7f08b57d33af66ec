"""A sweep: its settings, rows, curves, and means over seeds."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lam.cli import main
from lam.experiments import Experiment, Sweep, conduct, load_experiment
from lam.experiments.base import SECONDS, Outcome, Plot, Progress
from lam.experiments.report import DEVIATIONS


@dataclass(frozen=True, kw_only=True)
class Sum(Experiment):
    number: int = 0
    mode: str = "plain"

    name, title = "sum", "Is the sum right?"

    def run(self, progress: Progress) -> Outcome:
        progress("x", 1, 1)
        rows: list[dict[str, Any]] = [
            {"loss": loss, "sum": self.number + self.seed**2 + more, "odd": None if self.seed else 1.0, SECONDS: 1.0}
            for loss, more in (("a", 0.0), ("b", 0.5))
        ]
        return Outcome(rows, {"points": Plot("x", "y", {"a": [(0.0, 1.0)]})}, ["a note"], {"more": [{"kind": "k"}]})


def test_a_list_is_swept_unless_the_setting_is_a_list_itself() -> None:
    sweep = load_experiment("posterior-recovery", ["--ambiguity=[[16,32],[64,128]]", "--seed=[0,1]", "--losses=[elk]"])
    assert isinstance(sweep, Sweep)
    found = [(each.ambiguity, each.seed, each.losses) for each in sweep.experiments]  # pyright: ignore
    assert found == [((low, high), seed, ("elk",)) for low, high in ((16.0, 32.0), (64.0, 128.0)) for seed in (0, 1)]
    assert sweep.settings()["seed"] == [0, 1]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dimension=[2,1]", "dimension.*2.*1"),
        ("dimension=[2,x]", "dimension: .* got 'x'"),
        ("dimension=[2,3,2]", r"dimension.*\[2, 3, 2\]"),
        ("dimension=[]", "dimension: .* got "),
        ("width=[2,3]", "no setting width"),
    ],
)
def test_a_value_that_cannot_be_is_named_before_any_work(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_experiment("posterior-recovery", [f"--{setting}"])


def test_rows_say_their_values_and_curves_go_over_numbers() -> None:
    values = {"mode": ["plain", "odd"], "number": [10, 20]}
    sweep = Sweep(values, [Sum(mode=mode, number=number) for mode in values["mode"] for number in values["number"]])
    seen: list[str] = []
    outcome = sweep.run(lambda what, *_: seen.append(what))
    assert [(row["mode"], row["number"], row["loss"], row["sum"]) for row in outcome.rows] == [
        (mode, float(number), loss, number + more)
        for mode in values["mode"]
        for number in values["number"]
        for loss, more in (("a", 0.0), ("b", 0.5))
    ]
    curves = outcome.plots["sum over number"].curves
    assert curves == {f"{mode}, {loss}": [(10.0, 10.0 + more), (20.0, 20.0 + more)] for mode in values["mode"]
                      for loss, more in (("a", 0.0), ("b", 0.5))}  # fmt: skip
    assert not any(f"{SECONDS} over" in title or "over mode" in title for title in outcome.plots)
    assert "points; mode odd, number 20" in outcome.plots
    assert outcome.tables["more"][-1] == {"mode": "odd", "number": 20.0, "kind": "k"}
    assert (outcome.notes, seen[0], seen[-1]) == (["a note"], "1 of 4, x", "4 of 4, x")


def test_rows_of_experiments_with_different_columns_share_one_table() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wide(Sum):
        def run(self, progress: Progress) -> Outcome:
            rows = super().run(progress).rows
            return Outcome([{"loss": "a", "extra": 7.0, **row} if self.mode == "odd" else row for row in rows])

    values = {"mode": ["plain", "odd"], "number": [10, 20]}
    outcome = Sweep(values, [Wide(mode=mode, number=n) for mode in values["mode"] for n in values["number"]]).run(
        lambda *_: None
    )
    assert {tuple(row) for row in outcome.rows} == {("mode", "number", "loss", "sum", "odd", SECONDS, "extra")}
    assert [row["extra"] for row in outcome.rows] == [None] * 4 + [7.0] * 4
    assert outcome.plots["extra over number"].curves["odd, a"] == [(10.0, 7.0), (20.0, 7.0)]


def test_rows_of_several_seeds_are_means_beside_their_deviations() -> None:
    seeds, numbers = [0, 1, 2], [10, 20]
    sweep = Sweep(
        {"number": numbers, "seed": seeds}, [Sum(number=number, seed=seed) for number in numbers for seed in seeds]
    )
    outcome = sweep.run(lambda *_: None)
    rows, deviations = outcome.rows, outcome.tables[DEVIATIONS]
    assert [(row["number"], row["loss"]) for row in rows] == [(10, "a"), (10, "b"), (20, "a"), (20, "b")]
    for row, deviation in zip(rows, deviations, strict=True):
        sums = [row["number"] + seed**2 + (0.5 if row["loss"] == "b" else 0) for seed in seeds]  # pyright: ignore
        assert row["sum"] == pytest.approx(statistics.mean(sums))
        assert deviation["sum"] == pytest.approx(statistics.stdev(sums))
        assert row["odd"] is None  # two seeds do not define it
        assert "seed" not in row
    assert outcome.plots["sum over number"].curves["a"] == [(10.0, rows[0]["sum"]), (20.0, rows[2]["sum"])]


def test_a_result_that_is_not_finite_is_written_as_text(tmp_path: Path) -> None:
    class Infinite(Sum):
        def run(self, progress: Progress) -> Outcome:
            return Outcome([{"loss": "a", "R²": -math.inf}], {"R²": Plot("x", "y", {"a": [(0.0, math.nan)]})})

    conduct(Infinite(), tmp_path)
    assert json.loads((tmp_path / "outcome.json").read_text())["rows"] == [{"loss": "a", "R²": "-inf"}]
    assert "-inf" in (tmp_path / "report.html").read_text()


def test_the_command_writes_one_table_and_one_page(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tiny = "n_batches=4 batch_size=8 n_negatives=4 straightening=2 n_samples=[2,3] n_test=50 losses=[elk] seed=[0,1]"
    settings = [f"--{each}" for each in tiny.split()]
    assert main(["experiment", "posterior-recovery", "--quiet", "-o", str(tmp_path), *settings]) == 0
    assert "n_samples 2  loss elk" in capsys.readouterr().out
    written = json.loads((tmp_path / "outcome.json").read_text())
    assert [row["n_samples"] for row in written["rows"]] == [2.0, 3.0]
    assert written["settings"]["n_samples"] == [2, 3]
    page = (tmp_path / "report.html").read_text()
    assert "RMSE of μ over n_samples" in page
    assert DEVIATIONS in page

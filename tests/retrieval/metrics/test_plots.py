"""Plots: a readable PNG from ordinary, extreme and tiny data, no global changes, and errors for wrong data."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lam.retrieval.metrics.extremes import plot_extremes
from lam.retrieval.metrics.plots import (
    MOST,
    plot_bars,
    plot_corruption,
    plot_kappa,
    plot_precision_recall,
    plot_reliability,
    plot_reliability_curves,
    plot_roc,
    plot_sparsification,
    plot_tuning,
)
from lam.retrieval.metrics.uncertainty import ReliabilityBins, ausc
from lam.retrieval.metrics.votes import majority_votes

INSIDE, OUTSIDE = torch.linspace(0, 1, 40), torch.linspace(0.5, 2, 30)


def drawn(path: Path) -> Image.Image:
    """The picture, after a check that it is not empty, and alone in its folder."""
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    picture = Image.open(path).convert("RGB")
    assert picture.format is None or picture.format == "PNG"
    assert len(picture.getcolors(2**24) or []) > 20
    return picture


def bins(*shifts: int) -> ReliabilityBins:
    """Bins of votes; sampled networks agree more if more shifts are zero."""
    labels = torch.arange(60) % 4
    return majority_votes(torch.stack([labels.roll(shift) for shift in shifts]), labels, labels[:, None]).binned()


CORRECT, SCORES = INSIDE > 0.3, {"−κ": (INSIDE, OUTSIDE), "other": (INSIDE, INSIDE[:3])}
CURVES = {"noise": torch.tensor([1.0, 0.8, 0.4, 0.1]), "blur": torch.tensor([1.0, 0.9, 0.7, 0.2])}
TUNING = {
    "scales": [10.0**exponent for exponent in range(15)],
    "scores": [0.2 + 0.01 * abs(exponent - 5) for exponent in range(15)],
    **{"errors": [0.015] * 15, "eces": [0.05] * 15, "interval": (1e4, 1e6), "chosen": 1e6},
}
PICTURES: dict[str, Callable[[Path], None]] = {
    "sparsification": lambda path: plot_sparsification(path, {"−κ": (CORRECT, -INSIDE), "0": (CORRECT, 0 * INSIDE)}),
    "reliability curves": lambda path: plot_reliability_curves(path, {"a": bins(0, 0, 1), "b": bins(0, 1, 2)}),
    "bars": lambda path: plot_bars(path, {"mAP@1": {"a": 0.9, "b": 0.25}, "AUROC": {"a": 1.0, "b": None}}),
    "ROC": lambda path: plot_roc(path, SCORES),
    "precision and recall": lambda path: plot_precision_recall(path, SCORES),
    "corruption": lambda path: plot_corruption(path, {kind: 300 * part for kind, part in CURVES.items()}, CURVES),
    "corruption without κ": lambda path: plot_corruption(path, {}, CURVES),
    "tuning": lambda path: plot_tuning(path, **TUNING),
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_a_picture_is_drawn(draw: Callable[[Path], None], tmp_path: Path) -> None:
    draw(tmp_path / "plot.png")
    drawn(tmp_path / "plot.png")


def test_what_is_best_possible_is_drawn_where_all_are_of_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[list[str]] = []
    monkeypatch.setattr(
        "lam.retrieval.metrics.plots._finish",
        lambda _, axes, *__, **___: labels.append([line.get_label() for line in axes.get_lines()]),
    )
    correct = INSIDE > 0.3
    for other in (correct, ~correct):
        plot_sparsification(tmp_path / "plot.png", {"one": (correct, -INSIDE), "other": (other, -INSIDE)})
    ranked = [f"one   AUSC {ausc(correct, -INSIDE):.3f}", f"other   AUSC {ausc(~correct, -INSIDE):.3f}"]
    assert labels[0] == ["best possible", ranked[0], ranked[0].replace("one", "other"), "dropped at random"]
    assert labels[1] == ranked


@pytest.mark.parametrize("n_queries", [0, 1, 60])
def test_calibration(n_queries: int, tmp_path: Path) -> None:
    labels = torch.arange(n_queries) % 4
    predictions = torch.stack([labels.roll(shift) for shift in (0, 0, 1)])
    plot_reliability(tmp_path / "plot.png", majority_votes(predictions, labels, labels[:, None]).binned())
    drawn(tmp_path / "plot.png")


def test_the_legend_of_a_calibration_covers_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("lam.retrieval.metrics.plots.save_figure", lambda figure, _: figures.append(figure))
    confidence = torch.linspace(0.05, 0.95, 10)
    bins = ReliabilityBins(confidence, torch.ones(10), torch.full((10,), 7))  # right however unsure
    plot_reliability(tmp_path / "plot.png", bins, confidence="P(first hit is right)")
    figures[0].draw_without_rendering()
    axes = figures[0].axes[0]
    legend = axes.get_legend().get_window_extent()
    assert not [part for part in (*axes.patches, *axes.get_lines()) if legend.overlaps(part.get_window_extent())]
    assert 0 <= legend.x0 < legend.x1 <= figures[0].bbox.x1


def test_bars_of_different_systems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"figures.*\['one'\] and \['other'\]"):
        plot_bars(tmp_path / "plot.png", {"a": {"one": 1.0}, "b": {"other": 1.0}})


def test_dollar_signs_in_a_name_begin_no_formula(tmp_path: Path) -> None:
    name, values = r"a$\b$", torch.rand(4)
    plot_bars(tmp_path / "bars.png", {"recall@1": {name: 0.4}})
    plot_roc(tmp_path / "roc.png", {name: (values, values)})
    assert {path.name for path in tmp_path.iterdir()} == {"bars.png", "roc.png"}


def test_as_many_curves_as_allowed_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "lam.retrieval.metrics.plots._finish",
        lambda _, axes, *__, **___: seen.extend((line.get_color(), line.get_linestyle()) for line in axes.get_lines()),
    )
    plot_roc(tmp_path / "plot.png", {str(number): (INSIDE, OUTSIDE) for number in range(MOST)})
    assert len(set(seen)) == MOST + 1  # and the useless score


def test_a_long_legend_stands_beside_the_curves(tmp_path: Path) -> None:
    widths = []
    for count in (6, 13):
        plot_roc(tmp_path / "plot.png", {str(number): (INSIDE, OUTSIDE) for number in range(count)})
        with Image.open(tmp_path / "plot.png") as picture:
            widths.append(picture.width)
    assert widths[1] > 1.4 * widths[0]


@pytest.mark.parametrize(
    "kappa",
    [torch.logspace(-6, 8, 50), torch.full((5,), 3.0), torch.zeros(4), torch.tensor([7.0]), torch.tensor([0.0, 1e8])],
)
def test_kappa_over_any_range(kappa: torch.Tensor, tmp_path: Path) -> None:
    plot_kappa(tmp_path / "plot.png", {"known": kappa, "unknown": torch.ones(9)})
    drawn(tmp_path / "plot.png")


@pytest.mark.parametrize(("n_queries", "shape"), [(20, (1, 6, 5)), (1, (3, 4, 4)), (3, (7, 7))])
def test_extremes_show_the_ends_of_kappa(n_queries: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    asked: list[int] = []

    def image(index: int) -> torch.Tensor:
        asked.append(index)
        return torch.linspace(-0.1, 1.1, int(torch.tensor(shape).prod())).reshape(shape)

    plot_extremes(
        tmp_path / "plot.png",
        torch.logspace(-3, 6, n_queries).flip(0),
        lambda index: "outside" if index == 0 else index % 2 == 0,
        query_image=image,
        hit_image=lambda index: torch.rand(shape, generator=torch.Generator().manual_seed(index)),
    )
    shown = min(8, max(1, n_queries // 2))
    assert asked == list(range(n_queries))[::-1][:shown] + list(range(shown))
    drawn(tmp_path / "plot.png")


def test_extremes_name_what_a_query_from_outside_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []

    def remembered(axes: Any, corner: Any, image: torch.Tensor, title: str, color: str) -> None:
        titles.append(title)

    monkeypatch.setattr("lam.retrieval.metrics.extremes._show", remembered)
    images = {"query_image": lambda _: torch.ones(4, 4), "hit_image": lambda _: torch.ones(4, 4)}
    verdicts: tuple[bool | str, ...] = ("birds", False, True, True)
    kappa = torch.tensor([0.5, 2.0, 30.0, 20.0])
    plot_extremes(tmp_path / "plot.png", kappa, lambda query: verdicts[query], **images)
    assert titles == ["birds\nκ 0.5", "", "κ 2", "✗ wrong", "κ 30", "✓ right", "κ 20", "✓ right"]


def test_a_text_stays_in_its_frame_and_letters_without_a_glyph_are_boxes(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    outside = []
    for name, text in {"capitals": 200 * "WHERE ", "glyphs": 200 * "多", "short": "a"}.items():
        shown = {"query_image": lambda _, text=text: text, "hit_image": lambda _: "a"}
        plot_extremes(tmp_path / f"{name}.png", torch.ones(1), lambda _: True, **shown)
        pixels = np.array(Image.open(tmp_path / f"{name}.png").convert("L"))
        for top in (100, 580):  # the frames, at 160 dots an inch, and their lines
            pixels[top : top + 163, 47:210] = 255
        outside.append(pixels)
    assert (outside[0] == outside[2]).all()
    assert (outside[1] == outside[2]).all()
    assert not recwarn.list


def test_the_same_data_give_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        plot_roc(tmp_path / name, {"−κ": (INSIDE, OUTSIDE)})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_matplotlib_stays_as_it_was(tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    plot_roc(tmp_path / "plot.png", {"−κ": (INSIDE, OUTSIDE)})
    assert dict(mpl.rcParams) == before


def test_a_refused_plot_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    with pytest.raises(ValueError, match="scores.*between 1 and 24.*0"):
        plot_roc(path, {})
    with pytest.raises(ValueError, match="got 25"):
        plot_precision_recall(path, {str(i): (INSIDE, OUTSIDE) for i in range(25)})
    with pytest.raises(ValueError, match="correct of −κ.*none"):
        plot_sparsification(path, {"−κ": (torch.empty(0, dtype=torch.bool), torch.empty(0))})
    with pytest.raises(ValueError, match="kappa of known.*one value"):
        plot_kappa(path, {"known": torch.empty(0)})
    with pytest.raises(ValueError, match="kappa of known.*nan at index 0"):
        plot_kappa(path, {"known": torch.tensor([torch.nan])})
    assert not list(tmp_path.iterdir())


def test_extremes_refuse(tmp_path: Path) -> None:
    def draw(kappa: torch.Tensor, *, shape: tuple[int, ...] = (4, 4)) -> None:
        images = {"query_image": lambda _: torch.ones(shape), "hit_image": lambda _: torch.ones(4, 4)}
        plot_extremes(tmp_path / "plot.png", kappa, lambda _: True, **images)

    with pytest.raises(ValueError, match=r"images.*\(C, H, W\).*C 1 or 3.*\(2, 4, 4\)"):
        draw(torch.ones(2), shape=(2, 4, 4))
    with pytest.raises(ValueError, match="kappa.*one query"):
        draw(torch.ones(0))
    with pytest.raises(ValueError, match="kappa.*nan.*index 1"):
        draw(torch.tensor([1.0, torch.nan]))
    assert not list(tmp_path.iterdir())


def ticks(path: Path, monkeypatch: pytest.MonkeyPatch, low: float, high: float) -> list[tuple[float, float]]:
    """Left and right end, in pixels, of each label on the axis of κ."""
    figures: list[Any] = []
    monkeypatch.setattr("lam.retrieval.metrics.plots.save_figure", lambda figure, _: figures.append(figure))
    plot_kappa(path, {"known": torch.logspace(math.log10(low), math.log10(high), 50)})
    figures[0].draw_without_rendering()
    (axes,) = figures[0].axes
    labels = [label for which in ("major", "minor") for label in axes.get_xticklabels(which=which) if label.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    inside = [box for box in boxes if axes.bbox.x0 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1]
    return sorted((box.x0, box.x1) for box in inside)


@pytest.mark.parametrize(
    ("low", "high"), [(80, 800), (1, 1), (2e6, 5e6), (1, 1e8), (1e-6, 1e8), (3, 300), (90, 110), (150, 6e3)]
)
def test_labels_of_kappa_do_not_collide(
    low: float, high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = ticks(tmp_path / "plot.png", monkeypatch, low, high)
    assert 2 <= len(ends) <= 12
    assert all(right + 3 <= left for (_, right), (left, _) in itertools.pairwise(ends))


def test_no_corruption_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recall.*between 1 and 24"):
        plot_corruption(tmp_path / "none.png", {}, {})


def test_every_kind_of_corruption_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("lam.retrieval.metrics.plots.save_figure", lambda figure, _: figures.append(figure))
    plot_corruption(tmp_path / "plot.png", {}, {f"kind {number}": torch.ones(4) for number in range(9)})
    assert len(figures[0].axes[0].get_legend_handles_labels()[1]) == 9

"""Plot of the least and the most certain queries."""

from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lam.retrieval.metrics.plots import GRID, INK, MUTED, save_figure, short_number
from lam.utils.checks import check_finite

_VERDICTS = {True: ("✓ right", "#009e73"), False: ("✗ wrong", "#d55e00")}
_OUTSIDE = "#0072b2"
_EXTREMES = 8
_CHARACTERS, _TEXT_LINES = 19, 8  # greatest number of characters in a line, and of lines, of a text
_SIDE, _STEP, _HALF = 1.0, 1.12, 3.0  # inches: a picture's side, the step to the next picture, half the sheet's height


def plot_extremes(
    path: str | Path,
    kappa: Float[Tensor, " Q"],
    verdict: Callable[[int], bool | str],
    *,
    query_image: Callable[[int], Tensor | str],
    hit_image: Callable[[int], Tensor | str],
) -> None:
    """Draw the eight least and eight most certain queries, each with its κ, its first hit and the verdict on the hit.

    Fewer than sixteen queries are split into two halves.

    Args:
        kappa: (Q,) concentrations of the queries.
        verdict: takes a query's index; returns whether its first hit is right, or the data set's name for an OOD query.
        query_image: takes a query's index; returns its text, or its image, (C, H, W) or (H, W) in [0, 1] with C 1 or 3.
        hit_image: takes a query's index; returns the text or image of its first hit.
    """
    check_finite("kappa", kappa)
    if len(kappa) == 0:
        raise ValueError("kappa must hold at least one query, got none")
    count = min(_EXTREMES, max(1, len(kappa) // 2))
    order = kappa.argsort(stable=True).tolist()
    halves = ("Least", order[:count]), ("Most", order[::-1][:count])
    figure, axes = _sheet(max(_SIDE + (count - 1) * _STEP + 0.42, 3.2), 2 * _HALF)
    for top, (title, chosen) in zip((0.0, _HALF), halves, strict=True):
        axes.text(0.06, top + 0.08, f"{title} certain", fontsize=11, color=INK, fontweight="bold", va="top")
        rows = (top + 0.63, "query"), (top + 0.93 + _SIDE, "first hit")
        for above, name in rows:
            axes.text(0.16, above + _SIDE / 2, name, fontsize=9, color=MUTED, rotation=90, ha="center", va="center")
        for column, query in enumerate(chosen):
            worth = verdict(query)
            outside, words, color = (f"{worth}\n", "", INK) if isinstance(worth, str) else ("", *_VERDICTS[worth])
            certainty, left = f"{outside}κ {short_number(float(kappa[query]))}", 0.3 + column * _STEP
            _show(axes, (left, rows[0][0]), query_image(query), certainty, _OUTSIDE if outside else INK)
            _show(axes, (left, rows[1][0]), hit_image(query), words, color)
    save_figure(figure, path)


def _show(axes: Any, corner: tuple[float, float], image: Tensor | str, title: str, color: str) -> None:
    """Draw a picture or a text, with frame and title, in the square with this upper left corner."""
    from matplotlib.patches import Rectangle

    left, top = corner
    width, height = (_SIDE, _SIDE) if isinstance(image, str) else _draw(axes, corner, image)
    plain = color == INK
    place = left + (_SIDE - width) / 2, top + (_SIDE - height) / 2
    frame = axes.add_patch(
        Rectangle(place, width, height, fill=False, edgecolor=GRID if plain else color, linewidth=1 if plain else 2)
    )
    if isinstance(image, str):
        lines = wrap(image, width=_CHARACTERS, max_lines=_TEXT_LINES, placeholder="…")
        words, inset = "\n".join(lines).replace("$", "\\$"), 0.05 * _SIDE
        text = axes.text(left + inset, top + inset, words, fontsize=6, va="top", color=INK, clip_on=True)
        text.set_clip_path(frame)  # letters of some scripts, and capitals, are wider than most
    axes.text(left + _SIDE / 2, place[1] - 0.04, title, fontsize=8.5, color=color, ha="center", va="bottom")


def _draw(axes: Any, corner: tuple[float, float], image: Tensor) -> tuple[float, float]:
    """Draw an image as large as fits in the middle of a square; return the image's width and height."""
    pixels = image.detach().cpu().float()
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3):
        raise ValueError(f"images must have shape (C, H, W) with C 1 or 3, or (H, W), got {tuple(image.shape)}")
    width, height = (_SIDE * length / max(pixels.shape[1:]) for length in (pixels.shape[2], pixels.shape[1]))
    left, top = corner[0] + (_SIDE - width) / 2, corner[1] + (_SIDE - height) / 2
    axes.imshow(
        pixels.expand(3, -1, -1).permute(1, 2, 0).clamp(0, 1).numpy(),
        interpolation="nearest",
        aspect="auto",
        extent=(left, left + width, top + height, top),
    )
    return width, height


def _sheet(width: float, height: float) -> tuple[Any, Any]:
    """A figure with one set of axes, in inches from the upper left corner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_autoscale_on(False)
    axes.set_axis_off()
    return figure, axes

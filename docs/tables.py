"""Fills the tables of metrics and scores from their registries when the site is built."""

from typing import Any

from lam.retrieval.metrics.registry import METRICS
from lam.retrieval.metrics.scores import SCORES


def metrics() -> str:
    """The metrics that an evaluation measures."""
    rows = [
        (metric.name, f"`{key}`", metric.reading.partition(" ")[0], metric.meaning)
        for key, metric in METRICS.items()
        if metric.function is not None and not key.endswith(("@1", "@5"))
    ]
    return table(("metric", "key", "better", "what it says"), rows)


def scores() -> str:
    """The scores that an item or an answer can be doubted by."""
    rows = [(score.name, f"`{key}`", score.meaning) for key, score in SCORES.items()]
    return table(("score", "key", "what a high value says"), rows)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in their places: the hook that MkDocs calls for each page."""
    return markdown.replace("{{ metrics }}", metrics()).replace("{{ scores }}", scores())

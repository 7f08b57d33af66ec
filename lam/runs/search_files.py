"""Results of `lam search` as CSV (a line for each hit) or as JSON (an entry for each image or text)."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lam.runs.search import SearchResult
from lam.utils.files import write_csv, write_json

SUFFIXES = (".csv", ".json")
_OF_DECISION = ("probability", "p_known", "right_if_known", "statistic", "accept_above", "false_accept", "p_value")
_RENAMED = {"p_known": "known"}  # `p_known` is a column of the encoder
_UNSEEN = ("p_new", "p_in_gallery")
_OF_IMAGE: tuple[str, ...] = (
    *("image", "kappa", "variance", "decision", *(_RENAMED.get(name, name) for name in _OF_DECISION)),
    *("accept", "flagged_by", *_UNSEEN),
)
_OF_HIT: tuple[str, ...] = ("rank", "score", "hit_kappa", "id", "label", "path", "text", "uncertain", "fused")


def check_suffix(path: str | Path) -> None:
    """Reject a file with another suffix."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"the result of a search can be written as {' or '.join(SUFFIXES)}, got {path}")


def write_results(path: str | Path, results: Sequence[SearchResult]) -> None:
    """Write the results of searches atomically: images (or texts) in their order, hits best first.

    Each image has a `decision` and its evidence. `known` is P(the gallery holds a match), `right_if_known` is P(the
    first hit is right, if the gallery holds a match), and `probability` is their product. `accept` names the deciding
    score, `statistic` is its value, and `accept_above` its threshold. `false_accept` is the share of searches without a
    match whose first hit looks at least as good. `p_value` is the share of known queries that are as unusual by the
    score `flagged_by`. `p_new` and `p_in_gallery` are p-values of `lam.retrieval.decisions.unseen_classes`. Without a
    calibration, these fields and `uncertain` are null (empty in CSV). CSV leaves out nested values, and has one line
    for an image without hits.
    """
    check_suffix(path)
    decisions, queries = results[0].decisions, results[0].queries
    state = None if decisions is None else "stale" if decisions.stale else "current"
    entries = [entry for result in results for entry in _entries(result)]
    if Path(path).suffix.lower() == ".json":
        write_json(path, {"calibration": state, "images": entries})
        return
    parts = (*queries.parts(), "doubt") if queries.has_parts else ()
    columns = (*_OF_IMAGE, "calibration", *parts, *_OF_HIT)
    rows = ({**entry, "calibration": state, **hit} for entry in entries for hit in entry["hits"] or [{}])
    write_csv(path, columns, rows)


def _entries(result: SearchResult) -> Iterator[dict[str, Any]]:
    queries = result.queries
    decisions = result.decisions
    for row, image in enumerate(result.images):
        numbers = {"kappa": float(queries.kappa[row]), "variance": float(queries.variance[row])}
        entry = dict.fromkeys(_OF_IMAGE) | {"image": str(image), **numbers}
        if decisions is not None:
            numbers = {_RENAMED.get(name, name): float(getattr(decisions, name)[row]) for name in _OF_DECISION}
            entry |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            for name in ("decision", "accept", "flagged_by"):
                entry[name] = getattr(decisions, name)[row]
            entry |= zip(_UNSEEN, result.unseen[row] or (None, None), strict=True)
        if queries.has_parts:
            entry |= {name: float(values[row]) for name, values in queries.parts().items()}
            entry["doubt"] = result.doubts[row]
        hits = zip(result.hits.scores[row].tolist(), result.hits.kappa[row].tolist(), result.items[row], strict=True)
        entry["hits"] = [
            {
                "rank": rank,
                "score": score,
                "hit_kappa": kappa,
                "id": item.id,
                "label": item.label,
                "path": item.path,
                "text": item.text,
                "paths": json.loads(item.images.paths),
                "metadata": json.loads(item.metadata),
                "images": item.images.count,
                "fused": item.is_fused,
                "resultant": item.images.resultant,
                "least_kappa": item.least_kappa,
                "uncertain": result.is_uncertain(item),
            }
            for rank, (score, kappa, item) in enumerate(hits, start=1)
        ]
        yield entry

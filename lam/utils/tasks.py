"""Rows of a table from tasks, the items of a JSON file that Label Studio exported."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from statistics import mode
from typing import Any

_LOG = logging.getLogger(__name__)
_ITEM_CONTROLS = ("choices", "taxonomy", "rating")  # controls that label a whole item, not a part of it


def are_tasks(rows: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether rows are tasks: each has data and a list of annotations."""
    return bool(rows) and all(
        isinstance(row.get("data"), dict) and isinstance(row.get("annotations"), list) for row in rows.values()
    )


def rows_of_tasks(path: Path, tasks: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The data of each task, and its labels by the names of the controls (fields) in Label Studio's form.

    If some annotations of a task are marked as ground truth, only these count. The most frequent label wins. Skipped
    annotations do not count. Tasks without a label are left out; a log message counts them.

    Args:
        path: the file, for errors.
        tasks: tasks by number, each with `data` and `annotations`.

    Raises:
        ValueError: If annotations have another form; the error names the first task.
    """
    rows: dict[int, dict[str, Any]] = {}
    for number, task in tasks.items():
        try:
            labels = _labels(task["annotations"])
        except (AttributeError, KeyError, TypeError):
            raise ValueError(
                f"{path}: object {number} has no annotations of Label Studio's form: export a CSV file instead"
            ) from None
        if labels:
            rows[number] = {**task["data"], **labels}
    if n_left_out := len(tasks) - len(rows):
        _LOG.warning("%s: %d of %d tasks have no label and are left out", path, n_left_out, len(tasks))
    return rows


def _labels(annotations: list[Any]) -> dict[str, str]:
    """Labels of a task by control."""
    kept = [annotation for annotation in annotations if not annotation.get("was_cancelled")]
    kept = [annotation for annotation in kept if annotation.get("ground_truth")] or kept
    labels: dict[str, list[str]] = {}
    for result in (result for annotation in kept for result in annotation["result"]):
        if result["type"] in _ITEM_CONTROLS and (value := result["value"][result["type"]]):
            one = value[0] if isinstance(value, list) and len(value) == 1 else value
            labels.setdefault(result["from_name"], []).append(one if isinstance(one, str) else json.dumps(one))
    return {name: mode(of_control) for name, of_control in labels.items()}

"""A calibration from settings of both records."""

from dataclasses import fields, replace
from typing import Any

from lam.retrieval.decisions.calibrate import CalibrationData, Choices, calibrate
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.metrics.open_set import Searches
from lam.vmf.embeddings import Embeddings


def calibrated(searches: Searches, queries: Embeddings, *, key: str = "k", **settings: Any) -> Calibration:
    def taken(record: type) -> dict[str, Any]:
        return {field.name: settings.pop(field.name) for field in fields(record) if field.name in settings}

    data, choices = CalibrationData(searches, queries, **taken(CalibrationData)), Choices(**taken(Choices))
    return replace(calibrate(data, choices, key=key), **settings)

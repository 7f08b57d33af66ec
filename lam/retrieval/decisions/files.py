"""The files of a calibration, in the folder `calibration/` of a run, with a manifest of checksums.

calibration.json       key, targets, probabilities, histogram
tables.safetensors     calibration scores of all thresholds, reliability, and the reference features
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from lam.retrieval.decisions.acceptance import Acceptance
from lam.retrieval.decisions.calibration import Calibration, Histogram, Targets, UnmatchedQueries
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.cosine_intervals import CosineIntervals
from lam.retrieval.decisions.flags import OodDetector
from lam.retrieval.decisions.match_probability import MatchProbability
from lam.retrieval.decisions.probability import Correctness, MonotoneRegression
from lam.retrieval.decisions.unseen_classes import UnseenClasses
from lam.retrieval.decisions.verification import Verifier
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.uncertainty import ReliabilityBins
from lam.utils.files import MANIFEST, CorruptFileError, FolderFormat

FOLDER = "calibration"
FORMAT = FolderFormat(11, "calibration.json", ("tables.safetensors",))
_FLAG, _RELIABILITY, _ACCEPT = "flag_", "reliability_", "accept_"
_REFERENCE_FIELDS = ("labels", "lengths", "embeddings")
_PLAIN = ("key", "gallery_size", "flag", "depth", "dimension", "nearest", "facts")
_OWN: dict[str, Any] = {"targets": Targets, "kappa": Histogram, "intervals": CosineIntervals | None}
_OF_PARTS: dict[str, Any] = {
    "combined": MonotoneRegression | None,
    "ranking": dict[str, float],
    "accepts": tuple[str, ...],
    "answers": tuple[MatchProbability, ...],
    "sameness": Correctness | None,
}
"""Types of metadata: attributes of the calibration (`_OWN`), and of its parts (`_OF_PARTS`)."""


def save_calibration(run: str | Path, calibration: Calibration) -> None:
    """Write a calibration. After a crash, the folder holds the old calibration or the new one."""
    detector, verifier, acceptances = calibration.detector, calibration.verifier, calibration.acceptances
    metadata: dict[str, Any] = {
        **{name: getattr(calibration, name) for name in (*_PLAIN, *_OWN)},
        "combined": detector.combined,
        "ranking": detector.ranking,
        "accepts": [acceptance.accept for acceptance in acceptances],
        "answers": [acceptance.match_probability for acceptance in acceptances],
        "sameness": None if verifier is None else verifier.sameness,
    }
    FORMAT.write(Path(run) / FOLDER, metadata, _tables(calibration))


def load_calibration(run: str | Path, *, key: str) -> Calibration:
    """Read the calibration of a run, after a check of its files.

    Args:
        run: the run's folder.
        key: the run's fingerprint.

    Raises:
        ValueError: for a run without a calibration, or a calibration of another network, posterior or preprocessing.
        CorruptFileError: for a missing, truncated or altered file.
    """
    folder = Path(run) / FOLDER
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"the run in {run} has no calibration: `lam calibrate {run}` makes one")
    metadata, tables = FORMAT.read(folder)
    if metadata["key"] != key:
        raise ValueError(
            f"the calibration in {folder} is of another network, posterior or preprocessing than the run's, so its "
            f"thresholds do not apply: run `lam calibrate {run}` again"
        )
    from pydantic import TypeAdapter  # a tenth of a second to import

    kinds = _OWN | _OF_PARTS
    records = {name: TypeAdapter(kind).validate_python(metadata[name]) for name, kind in kinds.items()}
    _table(tables, f"{_FLAG}kappa")
    flags = {name.removeprefix(_FLAG): ConformalScores(tables[name]) for name in tables if name.startswith(_FLAG)}
    parts = {name: tables.get(f"reference_{name}") for name in _REFERENCE_FIELDS}
    sameness = records["sameness"]
    return Calibration(
        **{name: metadata[name] for name in _PLAIN},
        **{name: records[name] for name in _OWN},
        detector=OodDetector(flags, records["combined"], records["ranking"]),
        acceptances=tuple(
            Acceptance(
                accept,
                answer,
                ConformalScores(_table(tables, f"{_ACCEPT}{place}"), tables.get(f"{_ACCEPT}{place}_classes")),
                *(_table(tables, f"{_ACCEPT}{place}_{name}") for name in ("right", "asked", "is_right")),
            )
            for place, (accept, answer) in enumerate(zip(records["accepts"], records["answers"], strict=True))
        ),
        reliability=ReliabilityBins(
            *(_table(tables, f"{_RELIABILITY}{field.name}") for field in fields(ReliabilityBins))
        ),
        reference=Reference(tables["reference"], **parts) if "reference" in tables else None,
        verifier=None if sameness is None else Verifier(ConformalScores(_table(tables, "impostors")), sameness),
        unseen=UnseenClasses(tables["unseen_labels"], tables["unseen"]) if "unseen" in tables else None,
        unmatched=None
        if "unmatched" not in tables
        else UnmatchedQueries(tables["unmatched"], _table(tables, "unmatched_labels"), tables.get("unmatched_classes")),
    )


def _tables(calibration: Calibration) -> dict[str, Tensor]:
    tables: dict[str, Tensor | None] = {}
    for place, one in enumerate(calibration.acceptances):
        tables |= {f"{_ACCEPT}{place}": one.false_accepts.scores, f"{_ACCEPT}{place}_right": one.right_hits}
        tables |= {f"{_ACCEPT}{place}_asked": one.statistics, f"{_ACCEPT}{place}_is_right": one.is_right}
        tables[f"{_ACCEPT}{place}_classes"] = one.false_accepts.classes
    tables |= {f"{_FLAG}{name}": known.scores for name, known in calibration.detector.calibrated.items()}
    tables |= {f"{_RELIABILITY}{name}": values for name, values in vars(calibration.reliability).items()}
    if calibration.verifier is not None:
        tables["impostors"] = calibration.verifier.impostors.scores
    if (unseen := calibration.unseen) is not None:
        tables |= {"unseen": unseen.left_out, "unseen_labels": unseen.labels}
    if (of := calibration.unmatched) is not None:
        tables |= {"unmatched": of.mean, "unmatched_labels": of.labels, "unmatched_classes": of.classes}
    if (reference := calibration.reference) is not None:
        tables |= {"reference": reference.unit}
        tables |= {f"reference_{name}": getattr(reference, name) for name in _REFERENCE_FIELDS}
    return {name: table for name, table in tables.items() if table is not None}


def _table(tables: dict[str, Tensor], name: str) -> Tensor:
    if name not in tables:
        raise CorruptFileError(f"{FORMAT.tensors[0]} of the calibration does not hold {name}")
    return tables[name]

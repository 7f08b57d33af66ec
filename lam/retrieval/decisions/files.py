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
from lam.retrieval.decisions.flags import OodDetector
from lam.retrieval.decisions.match_probability import MatchProbability
from lam.retrieval.decisions.probability import Correctness, MonotoneRegression
from lam.retrieval.decisions.unseen_classes import UnseenClasses
from lam.retrieval.decisions.verification import CosineIntervals, Verifier
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.uncertainty import ReliabilityBins
from lam.utils.files import MANIFEST, FolderFormat

FOLDER = "calibration"
FORMAT = FolderFormat(12, "calibration.json", ("tables.safetensors",))
_FLAG = "flag."
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

_IN_TABLES: dict[str, type[Any]] = {
    "reliability": ReliabilityBins,
    "reference": Reference,
    "unseen": UnseenClasses,
    "unmatched": UnmatchedQueries,
}
"""Types of the calibration's attributes that hold only tensors."""


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
    flags = {name.split(".")[1]: ConformalScores(tables[name]) for name in tables if name.startswith(_FLAG)}
    in_tables: dict[str, Any] = {
        name: kind(**parts) if (parts := _parts(name, tables)) else None for name, kind in _IN_TABLES.items()
    }
    sameness = records["sameness"]
    return Calibration(
        **{name: metadata[name] for name in _PLAIN},
        **{name: records[name] for name in _OWN},
        detector=OodDetector(flags, records["combined"], records["ranking"]),
        acceptances=tuple(
            Acceptance(
                accept,
                answer,
                ConformalScores(**_parts(f"false_accepts.{place}", tables)),
                **_parts(f"acceptance.{place}", tables),
            )
            for place, (accept, answer) in enumerate(zip(records["accepts"], records["answers"], strict=True))
        ),
        verifier=None if sameness is None else Verifier(ConformalScores(**_parts("impostors", tables)), sameness),
        **in_tables,
    )


def _tables(calibration: Calibration) -> dict[str, Tensor]:
    parts: dict[str, Any] = {name: getattr(calibration, name) for name in _IN_TABLES}
    parts |= {f"{_FLAG}{name}": known for name, known in calibration.detector.calibrated.items()}
    parts["impostors"] = calibration.verifier and calibration.verifier.impostors
    for place, one in enumerate(calibration.acceptances):
        parts |= {f"acceptance.{place}": one, f"false_accepts.{place}": one.false_accepts}
    named = ((name, part, field.name) for name, part in parts.items() if part is not None for field in fields(part))
    tables = {f"{name}.{field}": getattr(part, field) for name, part, field in named}
    return {name: table for name, table in tables.items() if isinstance(table, Tensor)}


def _parts(name: str, tables: dict[str, Tensor]) -> dict[str, Any]:
    start = f"{name}."
    return {key.removeprefix(start): table for key, table in tables.items() if key.startswith(start)}

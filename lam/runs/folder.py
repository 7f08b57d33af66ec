"""The folder of a run: whose it is, and whether it is finished. What is in it is told by `lam.runs.run`, and opened by
`lam.runs.finished`."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from lam.datasets import Dataset
from lam.runs.config import RunConfig
from lam.utils import distributed
from lam.utils.files import MANIFEST, CorruptFileError, locked, read_json, verify, write_json, write_text

CONFIG, DATA, METRICS = "config.yaml", "data.json", "metrics.json"
ENCODER, GALLERY = "encoder", "gallery"
_SHOWN = 5


def is_finished(folder: Path) -> bool:
    """Tell whether a folder holds a finished run, every file of which is then checked.

    Raises:
        CorruptFileError: naming the file that is missing, truncated or altered.
    """
    if not (folder / MANIFEST).is_file():
        return False
    verify(folder, [CONFIG, METRICS, "report.html"])
    return True


def run_at(folder: Path) -> Path:
    """Give the folder of the run that is meant: this one, or, where this is no run, the only one inside."""
    inside = [] if _is_run(folder) else _runs_inside(folder)
    return inside[0] if len(inside) == 1 else folder


def require_finished(folder: Path) -> None:
    """Refuse a folder that holds no finished run; its report and plots are for people, and are not checked.

    Raises:
        ValueError: where the folder is no run, or the run did not finish.
        CorruptFileError: naming the file of the configuration that is missing, truncated or altered.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: `lam run CONFIG` or `lam demo` makes a run")
    if not _is_run(folder):
        inside = [run for run in _runs_inside(folder) if (run / MANIFEST).is_file()]
        hint = f"; did you mean {inside[0]}?" if inside else ": `lam run CONFIG` or `lam demo` makes one"
        raise ValueError(f"{folder} is no run of lam{hint}")
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"the run in {folder} has not finished: `lam run {folder}` continues it")
    verify(folder, [CONFIG, DATA], others=False)


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / MANIFEST).is_file()


def _runs_inside(folder: Path) -> list[Path]:
    return [path.parent for path in sorted(folder.glob(f"*/{CONFIG}"))]


def refuse_other_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that these settings cannot begin or continue; nothing is written.

    A setting that the folder's run did not have, as that was begun by an older version, counts as today's default.

    Raises:
        ValueError: where it holds a run with other settings, naming them, or files that are no run.
        CorruptFileError: where its configuration cannot be read.
    """
    path = folder / CONFIG
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give another --output")
    if path.is_file():
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise CorruptFileError(f"{path} is not valid YAML: {error}") from None
        different = sorted(_differences(_resolved(found), settings))
        if different:
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise ValueError(
                f"{folder} holds a run with other settings ({'; '.join(different[:_SHOWN])}{more}): "
                "give another --output or delete it"
            )
    elif folder.is_dir() and any(not _is_temporary(found) for found in folder.iterdir()):
        raise ValueError(f"{folder} holds files that are no run of lam: give another --output")


@contextmanager
def open_for_writing(folder: Path, settings: Mapping[str, Any], parts: Mapping[str, Dataset]) -> Iterator[None]:
    """Begin or continue a run in a folder that no other process writes to meanwhile.

    Of several processes that run together the first one claims it for all.

    Args:
        folder: made where it does not exist.
        settings: of the run, written to it.
        parts: the splits and OOD sets by name, whose fingerprints are written to it: on other data the test split of a
            continued run would hold what it was trained on.

    Raises:
        ValueError: as `refuse_other_run`; where the data are not those that the run began with; or where another
            process holds the folder.
    """
    with ExitStack() as held:
        distributed.broadcast_from_rank_zero(lambda: held.enter_context(_claimed(folder, settings, parts)))
        yield


@contextmanager
def _claimed(folder: Path, settings: Mapping[str, Any], parts: Mapping[str, Dataset]) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        refuse_other_run(folder, settings)
        for left in (*folder.glob(".*.tmp"), *(folder / "plots").glob(".*.tmp")):  # of a process that was killed
            left.unlink()
        if not (folder / CONFIG).is_file():
            write_text(folder / CONFIG, yaml.safe_dump(dict(settings), sort_keys=False))
        if not (folder / DATA).is_file():
            write_json(folder / DATA, {name: _summary(images) for name, images in parts.items()})
        if changed := changed_parts(folder, parts):
            raise ValueError(
                f"the data changed since the run in {folder} began ({', '.join(changed)}): "
                "give another --output or delete it"
            )
        yield


def changed_parts(folder: Path, parts: Mapping[str, Dataset]) -> list[str]:
    """Name the parts that are not those which the run in a folder began with."""
    began = read_json(folder / DATA)
    return [name for name, images in parts.items() if began.get(name) != _summary(images)]


def _summary(images: Dataset) -> dict[str, Any]:
    return {"items": len(images), "sha256": _fingerprint(images)}


def _fingerprint(items: Dataset) -> str:
    """What tells one collection from another without reading its files: targets, classes and names."""
    return hashlib.sha256(repr((items.targets.tolist(), items.classes, list(items.names))).encode()).hexdigest()


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _resolved(found: Any) -> Any:
    """Add defaults of today for settings that a folder's run did not have; what cannot be read stays as it is."""
    try:
        return RunConfig.parsed(found).resolved() if isinstance(found, Mapping) else found
    except ValueError:
        return found


def _differences(found: Any, wanted: Any, path: str = "") -> Iterator[str]:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for name in found.keys() | wanted.keys():
            yield from _differences(found.get(name), wanted.get(name), f"{path}.{name}" if path else name)
    elif found != wanted:
        yield f"{path or 'everything'} was {found}, is {wanted}"

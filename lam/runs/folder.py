"""The folder of a run: settings, fingerprints of the data, and whether the run is finished.

`lam.runs.run` lists the contents of the folder, and `lam.runs.finished` reads them.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from lam.datasets import Dataset, Splits
from lam.gallery.embed import read_damaged
from lam.runs.config import DataConfig, RunConfig
from lam.utils import files

CONFIG, DATA, METRICS = "config.yaml", "data.json", "metrics.json"
DAMAGED = "damaged.csv"
WATCH = "watch"  # folder with the tests of a service's promised rates, and the ids of judged answers
ENCODER, GALLERY = "encoder", "gallery"
_SHOWN = 5
_TEMPORARY = ".*.tmp"
FORMAT = 1  # format number of a run


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished run; a damaged file raises a `CorruptFileError`."""
    if not (folder / files.MANIFEST).is_file():
        return False
    try:
        files.verify(folder, [CONFIG, METRICS, "report.html"])
    except files.CorruptFileError as error:
        advice = f"restore it, or delete {files.MANIFEST} to evaluate again and fill the gallery with the test split"
        raise files.CorruptFileError(f"{error}: {advice}") from None
    return True


def run_at(folder: Path) -> Path:
    """The only run inside a folder; the folder itself if it is a run, or holds several or no runs."""
    runs = [] if _is_run(folder) else _runs_inside(folder)
    return runs[0] if len(runs) == 1 else folder


def require_finished(folder: Path) -> None:
    """Require a finished run; report and plots are not checked.

    Raises:
        ValueError: if the folder is not a run, or the run did not finish or has another format.
        CorruptFileError: naming the file of settings or data that is missing, truncated or altered.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: `lam run CONFIG` or `lam demo` makes a run")
    if not _is_run(folder):
        finished = [run for run in _runs_inside(folder) if (run / files.MANIFEST).is_file()]
        hint = f"; did you mean {finished[0]}?" if finished else ": `lam run CONFIG` or `lam demo` makes one"
        raise ValueError(f"{folder} is not a run of lam{hint}")
    if not (folder / files.MANIFEST).is_file():
        raise ValueError(f"the run in {folder} has not finished: `lam run {folder}` continues it")
    files.verify(folder, [CONFIG, DATA], others=False)
    read_data(folder)


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / files.MANIFEST).is_file()


def _runs_inside(folder: Path) -> list[Path]:
    return [path.parent for path in sorted(folder.glob(f"*/{CONFIG}"))]


def refuse_other_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Reject a folder in which a run with these settings cannot start or continue.

    A setting missing from the folder's configuration has its default. The folder of the data may differ;
    `refuse_changed_data` compares the data themselves.
    """
    path = folder / CONFIG
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give another --output")
    if path.is_file():
        previous = files.read_yaml(path)
        if isinstance(previous, Mapping):
            with suppress(ValueError):  # a file that is not a configuration is compared as it is
                previous = RunConfig.parsed(previous).resolved()
        differences = sorted(_differences(_without_roots(previous), _without_roots(settings)))
        if differences:
            more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            raise ValueError(
                f"{folder} holds a run with other settings ({'; '.join(differences[:_SHOWN])}{more}): "
                "give another --output or delete it"
            )
    elif folder.is_dir() and any(not path.match(_TEMPORARY) for path in folder.iterdir()):
        raise ValueError(f"{folder} holds files that are not a run of lam: give another --output")


def check_place(folder: Path, data: DataConfig) -> None:
    """Require a writable folder. It must lie outside the data's folder, where the run's plots would count as images."""
    files.check_writable(folder)
    if data.name != "folder" or data.root is None:
        return
    place, root = folder.resolve(), Path(data.root).expanduser().resolve()
    if place.is_relative_to(root) and not any(part.startswith(".") for part in place.relative_to(root).parts):
        raise ValueError(f"{folder} lies in {data.root}, so its pictures would be read as data: give another --output")


@contextmanager
def open_for_writing(
    folder: Path,
    settings: Mapping[str, Any],
    parts: Mapping[str, Dataset],
    splits: Splits,
    write_lists: Callable[[Path], None] = lambda folder: None,
) -> Iterator[None]:
    """Start or continue a run in a folder. Within the context, the folder is locked against other processes.

    A new run's settings, lists of copies and damaged files, gallery kind, and fingerprints of all `parts` are written.
    The fingerprints come last: a run without them checks its data again. Changed fingerprints are rejected, because on
    changed data the run could test on training items.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder):
        refuse_other_run(folder, settings)
        for leftover in (*folder.glob(_TEMPORARY), *(folder / "plots").glob(_TEMPORARY)):  # left by a killed process
            leftover.unlink()
        if not (folder / CONFIG).is_file():
            files.write_text(folder / CONFIG, yaml.safe_dump(dict(settings), sort_keys=False))
        if not (folder / DATA).is_file():
            summaries = {name: _summary(images) for name, images in parts.items()}
            kind = {"gallery": splits.gallery, "answers": splits.answers}
            write_lists(folder)
            files.write_record(folder / DATA, {**kind, "parts": summaries}, format=FORMAT)
        else:
            refuse_changed_data(folder, parts)
        yield


def left_out(folder: Path, root: str | None) -> frozenset[str]:
    """Paths of damaged images that a run leaves out; `root` is the present folder of the data."""
    paths, settings = read_damaged(folder / DAMAGED), folder / CONFIG
    if not paths or root is None:
        return paths
    before, now = (Path(place).resolve() for place in (files.read_yaml(settings)["data"]["root"], root))
    moved = (now / path.relative_to(before) if path.is_relative_to(before) else path for path in map(Path, paths))
    return frozenset(map(str, moved))


def refuse_changed_data(folder: Path, parts: Mapping[str, Dataset]) -> None:
    """Reject data that have changed since the run started."""
    if changed := changed_parts(folder, parts):
        raise ValueError(
            f"the data changed since the run in {folder} began ({', '.join(changed)}): "
            "give another --output or delete it"
        )


def changed_parts(folder: Path, parts: Mapping[str, Dataset]) -> list[str]:
    """Names of the splits that have changed since a run started; `parts` may lack soft labels."""
    at_start = read_data(folder)["parts"]
    return [name for name, items in parts.items() if not _summary(items).items() <= at_start.get(name, {}).items()]


def read_data(folder: Path) -> dict[str, Any]:
    """Facts on a run's data: kind of the `gallery`, whether it holds `answers`, and fingerprints of all `parts`."""
    return files.read_record(folder / DATA, format=FORMAT)


def _summary(items: Dataset) -> dict[str, Any]:
    """Number of items, SHA-256 of targets, classes and names (or texts), of the image files, and of any soft labels."""
    content = repr((items.targets.tolist(), items.classes, list(items.names))).encode()
    of_files = hashlib.sha256("".join(map(files.sha256_of, items.files)).encode()).hexdigest()
    summary = {"items": len(items), "sha256": hashlib.sha256(content).hexdigest(), "files": of_files}
    if items.soft_labels is not None:
        summary["soft_labels"] = hashlib.sha256(repr(items.soft_labels.tolist()).encode()).hexdigest()
    return summary


def _without_roots(settings: Any) -> Any:
    """Settings without the folders of the data."""
    if not isinstance(settings, Mapping) or not isinstance(data := settings.get("data"), Mapping):
        return settings
    ood = [{**each, "root": None} if isinstance(each, Mapping) else each for each in data.get("ood") or ()]
    return {**settings, "data": {**data, "root": None, "ood": ood}}


def _differences(previous: Any, current: Any, path: str = "") -> Iterator[str]:
    if isinstance(previous, Mapping) and isinstance(current, Mapping):
        for name in previous.keys() | current.keys():
            yield from _differences(previous.get(name), current.get(name), f"{path}.{name}" if path else name)
    elif previous != current:
        yield f"{path or 'everything'} was {previous}, is {current}"

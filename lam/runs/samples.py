"""A few inputs in a run's folder, to try the run without a data set.

samples/samples.json    the source of each sample, and texts
samples/1.png, ...      images
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lam.datasets import Dataset, Splits, Texts, docstrings
from lam.inputs.decoding import media_type
from lam.utils.files import MANIFEST, read_json, verify, write_atomically, write_json

FOLDER = "samples"
COUNT = 3  # largest number of known samples; one stranger follows them
_SIDE = 512  # pixels of an image's longer side
_LIST = f"{FOLDER}/samples.json"


@dataclass(frozen=True)
class Sample:
    """A text or an image (PNG or JPEG) to try a run with; `source` names the split or OOD set."""

    source: str
    stranger: bool
    text: str | None = None
    image: bytes | None = None


def draw_samples(splits: Splits, ood: dict[str, Dataset], candidates: Tensor, *, seed: int) -> list[Sample]:
    """Random samples from different classes in the gallery, and a stranger.

    Known samples come from the validation split, or from the test queries if the gallery holds no validation class. The
    stranger comes from the first OOD set, else from the held-out classes, else, for texts, from Python's docstrings.
    `candidates` are the positions of the gallery's items in the test split.
    """
    generator = torch.Generator().manual_seed(seed)
    gallery = splits.test.labels[candidates.cpu()]
    samples: list[Sample] = []
    for source, part in (("validation", splits.validation), ("test", splits.test)):
        drawn = _of_different_classes(part, gallery, generator)
        samples = [sample for row in drawn if (sample := _sample(part, row, source)) is not None]
        if samples:
            break
    strangers = ood or ({} if splits.strangers is None else {"strangers": splits.strangers})
    if not strangers and isinstance(splits.test, Texts):
        sentences = docstrings.splits(seed=seed).test
        strangers = {"docstrings": sentences} if set(sentences.classes).isdisjoint(splits.test.classes) else {}
    if strangers:
        source, part = next(iter(strangers.items()))
        row = int(torch.randint(len(part), (), generator=generator))
        if (stranger := _sample(part, row, source)) is not None:
            samples.append(replace(stranger, stranger=True))
    return samples


def write_samples(folder: Path, samples: list[Sample]) -> list[str]:
    """Write samples into the folder of a run; return the files' paths in the folder."""
    if not samples:
        return []
    (folder / FOLDER).mkdir(exist_ok=True)
    entries: list[dict[str, Any]] = []
    for number, sample in enumerate(samples, start=1):
        name = None
        if sample.image is not None:
            name = f"{FOLDER}/{number}.{media_type(sample.image).removeprefix('image/')}"
            write_atomically(folder / name, lambda path, image=sample.image: path.write_bytes(image))
        entries.append({**asdict(sample), "image": name})
    write_json(folder / _LIST, entries)
    return [_LIST, *(entry["image"] for entry in entries if entry["image"] is not None)]


def read_samples(folder: Path) -> tuple[Sample, ...]:
    """The samples of a finished run."""
    if _LIST not in read_json(folder / MANIFEST)["sha256"]:
        return ()
    verify(folder, [_LIST], others=False)
    entries = read_json(folder / _LIST)
    verify(folder, [entry["image"] for entry in entries if entry["image"] is not None], others=False)
    return tuple(
        Sample(**{**entry, "image": None if entry["image"] is None else (folder / entry["image"]).read_bytes()})
        for entry in entries
    )


def _of_different_classes(part: Dataset, gallery: Tensor, generator: torch.Generator) -> list[int]:
    """Positions of random queries with a label in the gallery, from as many classes as possible."""
    can_be_asked = torch.isin(part.labels, gallery)
    if part.is_query is not None:
        can_be_asked &= part.is_query
    rows = can_be_asked.nonzero().flatten()
    shuffled = rows[torch.randperm(len(rows), generator=generator)].tolist()
    of_class: dict[int, int] = {}
    for row in shuffled:
        of_class.setdefault(int(part.labels[row]), row)
    return list(dict.fromkeys([*of_class.values(), *shuffled]))[:COUNT]


def _sample(part: Dataset, row: int, source: str) -> Sample | None:
    """An item as a sample; None for an item without text and picture."""
    preview = part.preview(row, side=_SIDE)
    if preview.text is None and preview.picture is None:
        return None
    image = None if preview.text is not None else preview.picture
    return Sample(source, stranger=False, text=preview.text, image=image)

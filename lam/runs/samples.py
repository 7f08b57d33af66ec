"""A few samples of a run to try it with, kept in its folder so that none of its data sets is needed for that.

samples/samples.json    whence each comes, and of a text the text
samples/1.png, ...      the images
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lam.datasets import Dataset, Splits, Texts, docstrings
from lam.inputs.thumbnails import media_type
from lam.utils.files import MANIFEST, read_json, verify, write_atomically, write_json

FOLDER = "samples"
COUNT = 3
"""How many samples are known to the run; beside them is one stranger."""

_SIDE = 512  # pixels of an image's longer side
_LIST = f"{FOLDER}/samples.json"


@dataclass(frozen=True)
class Sample:
    """An input to try a run with.

    Attributes:
        source: the part of the data that it was drawn from, or the OOD set.
        stranger: whether nothing in the gallery matches it.
        text: of a text; None of an image.
        image: a PNG or JPEG file; None of a text.
    """

    source: str
    stranger: bool
    text: str | None = None
    image: bytes | None = None


def draw_samples(splits: Splits, ood: dict[str, Dataset], candidates: Tensor, *, seed: int) -> list[Sample]:
    """Samples at random: of different classes that the gallery has, and a stranger, where there are such.

    They are items of the validation split; where the gallery has none of its classes, queries of the test split. The
    stranger is of the first OOD set, or else of the classes that were set aside, or else, of texts, a sentence that
    ships with Python. The gallery holds the `candidates`, positions in the test split.
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
    for source, part in list(strangers.items())[:1]:
        row = int(torch.randint(len(part), (), generator=generator))
        stranger = _sample(part, row, source)
        samples += [] if stranger is None else [replace(stranger, stranger=True)]
    return samples


def write_samples(folder: Path, samples: list[Sample]) -> list[str]:
    """Write samples into the folder of a run; the files, relative to it, none where there is no sample."""
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
    """The samples of a finished run, checked before they are read; none where it has none.

    Raises:
        CorruptFileError: naming the file that is missing, truncated or altered.
    """
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
    """Positions of queries with a label of the gallery, at random, each of another class as far as there are some."""
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
    """An item as a sample; None where it cannot be shown, and so not be asked either."""
    preview = part.preview(row, side=_SIDE)
    if preview.text is None and preview.picture is None:
        return None
    return Sample(
        source, stranger=False, text=preview.text, image=None if preview.text is not None else preview.picture
    )

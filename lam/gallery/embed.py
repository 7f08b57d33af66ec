"""Embeds images of folders and lists, and texts of files.

One pass finds all damaged image files. They are listed with reasons, and raise an error or are left out.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from lam import datasets
from lam.datasets import Dataset, FolderImages, Texts
from lam.datasets.texts import Columns
from lam.encoders.base import Encoder
from lam.gallery.enrolment import SourceImage
from lam.gallery.item import content_id, file_id
from lam.gallery.shards import EmbeddedItems, Shard
from lam.inputs import Preprocessing, TextPreprocessing
from lam.models import sentences
from lam.retrieval.decisions.calibration import Calibration
from lam.utils.files import read_csv, write_csv
from lam.utils.notes import Note
from lam.vmf.embeddings import Embeddings

Kind = TypeVar("Kind", Preprocessing, TextPreprocessing)
BATCH = 64
MANY_FILES = 1000
"""Reading more files than this shows a progress bar."""

Items = TypeVar("Items", bound=Dataset)
Result = TypeVar("Result")


def read_images(
    files: Sequence[tuple[Path, Preprocessing]], use: Callable[[Path, Tensor], Result], *, progress: bool = True
) -> tuple[list[Result], dict[Path, str]]:
    """Decode image files in threads; return `use(path, tensor)` of each readable file, and why others are damaged."""
    hidden = not progress or len(files) <= MANY_FILES
    results, damaged = list[Result](), dict[Path, str]()

    def read(file: tuple[Path, Preprocessing]) -> tuple[Result | None, str | None]:
        path, preprocessing = file
        try:
            return use(path, preprocessing(path)), None
        except ValueError as error:
            return None, str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside of Python's lock
        done = tqdm(pool.map(read, files), total=len(files), desc="checking", unit="image", disable=hidden)
        for (path, _), (result, reason) in zip(files, done, strict=True):
            if reason is None:
                results.append(result)  # pyright: ignore[reportArgumentType]
            else:
                damaged[path] = reason
    return results, damaged


@dataclass
class DamagedFiles:
    """The damaged files so far, and how to treat them.

    Attributes:
        listed: CSV file for the list, with columns path and reason; None for no list.
        skip: whether to leave damaged files out, instead of raising an error.
        reasons: reasons by path.
    """

    listed: Path | None = None
    skip: bool = False
    reasons: dict[Path, str] = field(default_factory=dict)

    def settle(self, n_files: int) -> None:
        """Write the list of damaged files, if any, and warn.

        Raises:
            ValueError: for damaged files without `skip`, or if all `n_files` files are damaged.
        """
        if not self.reasons:
            return
        message = f"{len(self.reasons)} of {n_files} images cannot be read"
        if self.listed is not None:
            write_damaged(self.reasons, self.listed)
            message += f", all listed in {self.listed}"
        message += f": {next(iter(self.reasons.values()))}"
        if not self.skip:
            raise ValueError(f"{message}; replace or remove them, or leave them out with --skip-damaged")
        if len(self.reasons) == n_files:
            raise ValueError(message)
        warnings.warn(f"{message}; they are left out", Note, stacklevel=2)


class ImageBatches:
    """Batches of network inputs from image files, without damaged files.

    Args:
        damaged: collects the damaged files; after the last batch, `damaged.settle` is called.
        goes_on: whether to yield batches after a damaged file; by default `damaged.skip`. All files are read anyway.

    Attributes:
        read: readable files of all batches so far, in order.
    """

    def __init__(
        self, files: Sequence[Path], preprocessing: Preprocessing, damaged: DamagedFiles, *, goes_on: bool | None = None
    ) -> None:
        size = BATCH if preprocessing.shape is not None else 1
        self._parts = [files[start : start + size] for start in range(0, len(files), size)]
        self._preprocessing, self._damaged = preprocessing, damaged
        self._goes_on = damaged.skip if goes_on is None else goes_on
        self.read = list[Path]()

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._parts:
            files = [(path, self._preprocessing) for path in part]
            read, damaged = read_images(files, lambda path, image: (path, image), progress=False)
            self._damaged.reasons |= damaged
            if read and (self._goes_on or not self._damaged.reasons):
                self.read += [path for path, _ in read]
                yield torch.stack([image for _, image in read])
        self._damaged.settle(len({path for part in self._parts for path in part}))


def drop_unreadable(images: Items, damaged: DamagedFiles) -> Items:
    """The images with readable files; every file is read. Errors as in `DamagedFiles.settle`."""
    files = [(path, images.preprocessing) for path in images.files]
    _, reasons = read_images(files, lambda path, image: None, progress=False)
    damaged.reasons |= reasons
    damaged.settle(len(files))
    return without_damaged(images, frozenset(map(path_key, reasons)))


def write_damaged(damaged: Mapping[Path, str], listed: Path) -> None:
    """Write paths and reasons as CSV."""
    listed.parent.mkdir(parents=True, exist_ok=True)
    write_csv(listed, ("path", "reason"), ({"path": path, "reason": reason} for path, reason in damaged.items()))


def read_damaged(listed: Path) -> frozenset[str]:
    """The paths in a list of damaged files; empty if the list is missing."""
    return frozenset(row["path"] for row in read_csv(listed))


def without_damaged(items: Items, damaged: frozenset[str]) -> Items:
    """The items whose files are not damaged; a `ValueError` if no item is left."""
    kept = [row for row, path in enumerate(items.files) if path_key(path) not in damaged]
    if not damaged or not items.files or len(kept) == len(items):
        return items
    if not kept:
        raise ValueError(f"all {len(items)} images are damaged, such as {items.files[0]}")
    return items.subset(torch.tensor(kept))


def path_key(path: Path) -> str:
    """A path as text for the list of damaged files: bytes that are not valid text become question marks."""
    return str(path).encode(errors="replace").decode()


def embed_items(
    encoder: Encoder,
    source: str | Path,
    *,
    columns: Columns | None = None,
    shard: Shard | None = None,
    calibration: Calibration | None = None,
    damaged: DamagedFiles | None = None,
    progress: bool = True,
) -> EmbeddedItems:
    """Embed the images of a folder, with or without class sub-folders, or the texts of a file.

    If a file holds questions and answers, the answers are embedded. A warning counts texts that are cut.

    Args:
        source: a folder; for an encoder of texts a table, see `Table.read`.
        columns: columns of the table.
        shard: the shard to embed; by default all items.
        calibration: calibration of the run; it flags items whose embeddings are too unusual to judge.
        damaged: collects damaged image files; by default they raise an error.

    Raises:
        ValueError: for an empty shard, damaged files, an invalid id, label or metadata; also as in `read_items`.
    """
    items = read_items(encoder, source, columns, damaged=damaged if takes_texts(encoder) else None).candidates
    damaged = DamagedFiles() if damaged is None else damaged
    part = items if shard is None else items.subset(shard.positions(len(items)))
    sources = _sources(part)
    batches: list[Embeddings] = []
    flagged: list[Tensor] = []
    if isinstance(part, FolderImages):
        inputs = ImageBatches(part.paths, part.preprocessing, damaged)
    else:  # without a generator, a loader draws from torch's global one
        inputs = DataLoader(part, batch_size=BATCH, generator=torch.Generator())
    for prediction in encoder.predict_batches(inputs, progress=progress):
        batches.append(prediction.embeddings)
        if calibration is not None:
            flagged.append(calibration.flagged(prediction.embeddings, prediction.features))
    if isinstance(items, Texts):
        names = items.texts
    else:
        root = os.path.commonpath(items.paths)
        names = [os.path.relpath(path, root) for path in items.paths]
    skipped = [row for row, source in enumerate(sources) if Path(source.path) in damaged.reasons]
    read = [source for source in sources if Path(source.path) not in damaged.reasons]
    flags = torch.cat(flagged) if flagged else None
    return EmbeddedItems(names, read, Embeddings.concatenate(batches), flags, torch.tensor(skipped, dtype=torch.int64))


def takes_texts(encoder: Encoder) -> bool:
    """Whether an encoder embeds texts."""
    return isinstance(encoder.preprocessing, TextPreprocessing)


def read_items(
    encoder: Encoder,
    source: str | Path,
    columns: Columns | None = None,
    *,
    labelled: bool = False,
    answered: bool = True,
    damaged: DamagedFiles | None = None,
) -> FolderImages | Texts:
    """The images of a folder (`lam.datasets.folder.read`), or the texts of a file (`lam.datasets.texts.read`).

    A warning counts texts that the network does not read to the end.

    Args:
        source: a folder; for an encoder of texts a file with these `columns`.
        labelled: whether every image or text must have a label.
        answered: whether to read the answers in a file; if not, the file may lack them.
        damaged: if given, every image file is read, and damaged files are collected here. With
            `damaged.skip`, table rows with an empty cell are left out.

    Raises:
        ValueError: for an encoder without preprocessing, a folder for an encoder of texts, columns for an encoder of
            images, or damaged files; also as in the two `read` functions.
    """
    if isinstance(encoder.preprocessing, TextPreprocessing):
        if Path(source).is_dir():
            raise ValueError(
                f"{source} is a folder, and this run takes texts: give a table of them, such as a CSV file"
            )
        texts = datasets.texts.read(
            root=source,
            preprocessing=encoder.preprocessing,
            columns=columns,
            labelled=labelled,
            answered=answered,
            skip_empty=damaged is not None and damaged.skip,
        )
        if n_cut := sum(is_cut(encoder.network, encoder.preprocessing, text) for text in texts.texts):
            warnings.warn(
                f"{source}: {n_cut} of {len(texts)} texts are longer than the network reads: cut", stacklevel=2
            )
        return texts
    if columns is not None:
        raise ValueError("this run takes images, which have no columns: leave columns out")
    preprocessing = preprocessing_of(encoder, Preprocessing)
    images = datasets.folder.read(root=source, preprocessing=preprocessing, labelled=labelled)
    return images if damaged is None else drop_unreadable(images, damaged)


def _sources(items: FolderImages | Texts) -> list[SourceImage]:
    labels = [items.classes[label] for label in items.labels.tolist()]
    if isinstance(items, FolderImages):
        return [SourceImage(str(path), label, file_id(path)) for path, label in zip(items.paths, labels, strict=True)]
    sources: list[SourceImage] = []
    for row, label in enumerate(labels):
        preview = items.preview(row)
        facts, text = dict(preview.metadata), str(preview.text)
        item_id = None if (value := facts.pop("id", None)) is None else str(value).strip() or None
        sources.append(SourceImage(preview.path, label, content_id(text.encode()), item_id, {**facts, "text": text}))
    return sources


def embed_images(
    encoder: Encoder, images: Sequence[SourceImage], *, damaged: DamagedFiles | None = None, progress: bool = True
) -> tuple[list[SourceImage], Embeddings]:
    """The readable images of a list (`lam.gallery.image_list.read_list`), and their embeddings.

    `damaged` collects damaged files; by default they raise an error.

    Raises:
        ValueError: for an encoder without preprocessing, or damaged files.
    """
    damaged = DamagedFiles() if damaged is None else damaged
    files = [Path(image.path) for image in images]
    batches = ImageBatches(files, preprocessing_of(encoder, Preprocessing), damaged)
    embeddings = encoder.embed(batches, progress=progress)
    return [image for image, file in zip(images, files, strict=True) if file not in damaged.reasons], embeddings


def preprocessing_of(encoder: Encoder, kind: type[Kind]) -> Kind:
    """The preprocessing of an encoder; a `ValueError` if it is missing or not a `kind`."""
    preprocessing = encoder.preprocessing
    if preprocessing is None:
        files = "texts" if kind is TextPreprocessing else "image files"
        raise ValueError(f"the encoder has no preprocessing for {files}: fit it with preprocessing=...")
    if not isinstance(preprocessing, kind):
        takes = "texts: give each by --text" if isinstance(preprocessing, TextPreprocessing) else "images: give files"
        raise ValueError(f"this run takes {takes}")
    return preprocessing


def is_cut(network: nn.Module | None, preprocessing: TextPreprocessing, text: str) -> bool:
    """Whether preprocessing or network reads only the beginning of a text."""
    return preprocessing.is_cut(text) or sentences.is_cut(network, text)

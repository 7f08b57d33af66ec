"""Embeds images of folders and lists, and texts of files."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lam import datasets
from lam.datasets import FolderImages, Texts
from lam.datasets.texts import Columns
from lam.encoders.base import Encoder
from lam.gallery.damaged import BATCH, DamagedFiles, ImageBatches, drop_unreadable
from lam.gallery.enrolment import SourceImage
from lam.gallery.item import content_id, file_id
from lam.gallery.shards import EmbeddedItems, Shard
from lam.inputs import Preprocessing, TextPreprocessing
from lam.models import sentences
from lam.retrieval.decisions.calibration import Calibration
from lam.vmf.embeddings import Embeddings

Kind = TypeVar("Kind", Preprocessing, TextPreprocessing)


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
    names = items.texts if isinstance(items, Texts) else _relative_paths([str(path) for path in items.paths])
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
            `damaged.skip`, rows of a table with an empty cell are left out.

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
        item_id = str(facts.pop("id")) if "id" in facts else None
        sources.append(SourceImage(preview.path, label, content_id(text.encode()), item_id, {**facts, "text": text}))
    return sources


def _relative_paths(paths: Sequence[str]) -> list[str]:
    """Paths relative to their common folder."""
    root = os.path.commonpath(paths)
    return [os.path.relpath(path, root) for path in paths]


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

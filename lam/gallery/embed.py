"""Images of folders and lists, embedded by an encoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils.data import DataLoader

from lam import datasets
from lam.datasets import FolderImages
from lam.encoders.base import Encoder
from lam.gallery.enrolment import SourceImage
from lam.gallery.image_list import ListedImage
from lam.gallery.item import file_id
from lam.gallery.shards import Shard
from lam.inputs import Preprocessing, TextPreprocessing
from lam.models import sentences
from lam.retrieval.decisions.calibration import Calibration
from lam.vmf.embeddings import Embeddings

BATCH = 64
Kind = TypeVar("Kind", Preprocessing, TextPreprocessing)


@dataclass(frozen=True)
class EmbeddedFolder:
    """The images of a folder, embedded.

    Attributes:
        images: all of the folder.
        embeddings: of N of them: all, or those of a shard.
        flagged: (N,) which of these a calibration flags as unlike what it knows; None without one.
    """

    images: FolderImages
    embeddings: Embeddings
    flagged: Bool[Tensor, " N"] | None

    @property
    def sources(self) -> list[SourceImage]:
        """What would be indexed, where all were embedded."""
        labels = (self.images.classes[label] for label in self.images.labels.tolist())
        return [
            SourceImage(str(path), label, file_id(path)) for path, label in zip(self.images.paths, labels, strict=True)
        ]


def embed_folder(
    encoder: Encoder,
    folder: str | Path,
    *,
    shard: Shard | None = None,
    calibration: Calibration | None = None,
    progress: bool = True,
) -> EmbeddedFolder:
    """Embed the images of a folder, with class sub-folders or without: all, or those of a shard.

    Args:
        encoder: of a run.
        folder: the images.
        shard: which of them; by default all.
        calibration: of the run, by whose flag images are told that cannot be judged.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: for an encoder that does not know how an image becomes an input, a shard without an image, or naming
            a file that is no image.
    """
    images = datasets.folder.read(root=folder, preprocessing=preprocessing_of(encoder, Preprocessing))
    part = images if shard is None else images.subset(shard.positions(len(images)))
    batches: list[Embeddings] = []
    flagged: list[Tensor] = []
    for prediction in encoder.predict_batches(_loader(part), progress=progress):
        batches.append(prediction.embeddings)
        if calibration is not None:
            flagged.append(calibration.flagged(prediction.embeddings, prediction.features))
    return EmbeddedFolder(images, Embeddings.concatenate(batches), torch.cat(flagged) if flagged else None)


def embed_list(
    encoder: Encoder, listed: Sequence[ListedImage], *, progress: bool = True
) -> tuple[list[SourceImage], Embeddings]:
    """Embed the images of a list.

    Args:
        encoder: of a run.
        listed: as `lam.gallery.image_list.read_list` reads it.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: as `embed_folder`; or for an id, a label or metadata that no item can have.
    """
    names = {label: number for number, label in enumerate(sorted({image.label for image in listed}))}
    images = FolderImages(
        [image.path for image in listed],
        torch.tensor([names[image.label] for image in listed]),
        name="list",
        classes=list(names),
        preprocessing=preprocessing_of(encoder, Preprocessing),
    )
    sources = [
        SourceImage(str(image.path), image.label, file_id(image.path), image.id, image.metadata) for image in listed
    ]
    return sources, encoder.embed(_loader(images), progress=progress)


def preprocessing_of(encoder: Encoder, kind: type[Kind]) -> Kind:
    """How an image, or a text, becomes an input of an encoder.

    Args:
        encoder: of a run.
        kind: of what shall become an input: `Preprocessing` of images, `TextPreprocessing` of texts.

    Raises:
        ValueError: where the encoder does not know it, or takes the other kind.
    """
    preprocessing = encoder.preprocessing
    if preprocessing is None:
        raise ValueError("the encoder does not know how an image becomes an input: fit it with preprocessing=...")
    if not isinstance(preprocessing, kind):
        takes = (
            "texts: give --text or a CSV file of texts" if isinstance(preprocessing, TextPreprocessing) else "images"
        )
        raise ValueError(f"this run takes {takes}")
    return preprocessing


def is_cut(encoder: Encoder, preprocessing: TextPreprocessing, text: str) -> bool:
    """Whether only the beginning of a text is read: as an input, or by the network of an encoder."""
    return preprocessing.is_cut(text) or sentences.is_cut(encoder.network, text)


def _loader(images: FolderImages) -> DataLoader[Any]:
    return DataLoader(images, batch_size=BATCH, generator=torch.Generator())  # torch's global one stays as it is

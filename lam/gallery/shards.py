"""Embeddings of a folder, or of a file of texts, as .npz files: one for all items, or one for each shard to be merged.

paths, labels (N,) text      ids, positions (N,) int64: hash of the content; position in the unsharded list
mean (N, D)                  kappa, variance, resultant (N,)
shard (2,) i and n           total (): number of all items    listing (): hash of all items' names
encoder (): fingerprint      mean_samples (): samples averaged in each mean; 0 if the means are not averages
facts (bytes,) uint8         JSON, a list of N objects with id and metadata, if there are any
skipped (M,) int64           positions of damaged images, if there are any
flagged (N,)                 whether the calibration flags an image, if the run has a calibration
kappa_epistemic, kappa_aleatoric, p_known (N,)   if the encoder has learned its ambiguity; merging drops them
"""

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64

from lam.gallery.enrolment import SourceImage
from lam.utils.files import CorruptFileError, check_format, write_atomically
from lam.vmf.embeddings import Embeddings

FORMAT = 1
# dtype kind and number of axes of each array
_ROWS = dict.fromkeys(("paths", "labels"), "U1") | dict.fromkeys(("ids", "positions"), "i1")
_ROWS |= {"mean": "f2", "kappa": "f1", "variance": "f1", "resultant": "f1"}
_FACTS = {"format": "i0", "shard": "i1", "total": "i0", "listing": "U0", "encoder": "U0", "mean_samples": "i0"}
_OPTIONAL = {"facts": "u1", "skipped": "i1"}
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError, MemoryError)
_UNREADABLE += (zipfile.BadZipFile, zlib.error)  # NumPy raises all of these on flipped bits
_UNPACKED, _COMPRESSION = 32 * 2**20, 200  # a file may unpack to these bytes, or to this multiple of its size


@dataclass(frozen=True)
class Shard:
    """Shard i of n: the items i, i + n, i + 2n and so on, counted from 1; a `ValueError` if i is not from 1 to n."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"shard i/n must have i from 1 to n, got {self.number}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read i/n.

        Raises:
            ValueError: for another form, or an i that is not from 1 to n.

        Example:
            >>> Shard.parse("2/3").positions(8).tolist()
            [1, 4, 7]
        """
        numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        if numbers is None:
            raise ValueError(f"shard must be i/n, such as 1/4, got {text!r}")
        return cls(int(numbers[1]), int(numbers[2]))

    def positions(self, total: int) -> torch.Tensor:
        """Positions of the shard's images among `total` images; a `ValueError` if the shard is empty."""
        if total < self.number:
            raise ValueError(f"shard {self.number}/{self.count} of {total} images is empty: make fewer shards")
        return torch.arange(self.number - 1, total, self.count)


@dataclass(frozen=True)
class EmbeddedItems:
    """The embedded images of a folder, or texts of a file, or a shard of them.

    Attributes:
        names: paths of all images, relative to their folder, or all texts.
        sources: N readable images, or N texts, of the shard.
        embeddings: embeddings of the sources.
        flagged: (N,) whether the calibration flags a source; None without calibration.
        skipped: (M,) positions of damaged images in the shard.
    """

    names: Sequence[str]
    sources: list[SourceImage]
    embeddings: Embeddings
    flagged: Bool[torch.Tensor, " N"] | None = None
    skipped: Int64[torch.Tensor, " M"] = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def save_embeddings(path: str | Path, embedded: EmbeddedItems, *, encoder: str, shard: Shard) -> None:
    """Write the embeddings of a shard atomically; `encoder` is a fingerprint from `lam.encoders.files`."""
    sources, embeddings, names = embedded.sources, embedded.embeddings, embedded.names
    positions, skipped = shard.positions(len(names)).numpy(), embedded.skipped.numpy()
    facts = [{"id": source.listed_id, "metadata": source.metadata} for source in sources]
    is_listed = any(value is not None for fact in facts for value in fact.values())
    arrays: dict[str, Any] = {
        "paths": np.array([source.path for source in sources]),
        "labels": np.array([source.label for source in sources]),
        "ids": np.array([source.content for source in sources]),
        "positions": np.delete(positions, skipped),
        "format": np.array(FORMAT),
        "shard": np.array([shard.number, shard.count]),
        "total": np.array(len(names)),
        "listing": np.array(hashlib.sha256("\0".join(names).encode(errors="surrogatepass")).hexdigest()),
        "encoder": np.array(encoder),
        "mean_samples": np.array(embeddings.mean_samples or 0),
        **({"skipped": positions[skipped]} if len(skipped) else {}),
        **({} if embedded.flagged is None else {"flagged": embedded.flagged.numpy()}),
        **({"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)} if is_listed else {}),
        **{name: values.cpu().numpy() for name, values in embeddings.rows().items()},
    }

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    write_atomically(path, write)


def merge_embeddings(paths: Sequence[str | Path], *, encoder: str) -> tuple[list[SourceImage], Embeddings]:
    """Merge the shards of a folder, given in any order; the result has the order of the folder.

    Args:
        paths: a file for each shard.
        encoder: fingerprint of the encoder that must have made the files.

    Raises:
        CorruptFileError: for a file that is truncated, altered or of another kind.
        ValueError: for a missing file or shard, a repeated shard, or another encoder, folder or number of shards.
    """
    if not paths:
        raise ValueError("merging needs at least one file: give the files that `lam embed` wrote")
    parts = {Path(path): _read(Path(path)) for path in paths}
    _refuse_others(parts, encoder)
    joined = {name: np.concatenate([part[name] for part in parts.values()]) for name in _ROWS}
    order = np.argsort(joined["positions"], kind="stable")
    rows = {name: array[order] for name, array in joined.items()}
    facts = [of_one for path, part in parts.items() for of_one in _facts(path, part)]
    listed = (rows["paths"].tolist(), rows["labels"].tolist(), rows["ids"].tolist(), [facts[row] for row in order])
    sources = [
        SourceImage(path, label, content, of_one["id"], of_one["metadata"])
        for path, label, content, of_one in zip(*listed, strict=True)
    ]
    tensors = (torch.from_numpy(rows[name]) for name in ("mean", "kappa", "resultant", "variance"))
    mean_samples = int(next(iter(parts.values()))["mean_samples"]) or None  # one encoder, one number
    return sources, Embeddings(*tensors, mean_samples=mean_samples)


def _is_fact(of_one: Any) -> bool:
    if not isinstance(of_one, dict) or set(of_one) != {"id", "metadata"}:
        return False
    return isinstance(of_one["id"], str | None) and isinstance(of_one["metadata"], dict | None)


def _facts(path: Path, part: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The id in the list and the metadata of each row; None for a missing value."""
    count = len(part["paths"])
    if "facts" not in part:
        return [{"id": None, "metadata": None}] * count
    try:
        facts = json.loads(part["facts"].tobytes())
    except ValueError:
        facts = None
    if isinstance(facts, list) and len(facts) == count and all(map(_is_fact, facts)):
        return facts
    raise CorruptFileError(f"{path} has facts that do not match its {count} rows: write it again")


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give the files that `lam embed` wrote")
    try:
        _refuse_bomb(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            part = {name: arrays[name] for name in (*_ROWS, *_FACTS, *(_OPTIONAL.keys() & set(arrays)))}
    except _UNREADABLE as error:
        raise CorruptFileError(
            f"{path} is truncated, altered or not a file of embeddings ({error}): write it again with `lam embed`"
        ) from None
    for name, array in part.items():
        fits = f"{array.dtype.kind}{array.ndim}" == (_ROWS | _FACTS | _OPTIONAL)[name]
        if not fits or (name in _ROWS and len(array) != len(part["paths"])):
            raise CorruptFileError(f"{path} has {name} of shape {array.shape} and type {array.dtype}: write it again")
    check_format(path, int(part["format"]), readable=FORMAT)
    number, count = part["shard"].tolist()
    expected = Shard(number, count).positions(int(part["total"])).numpy()
    if not np.array_equal(np.sort([*part["positions"], *part.get("skipped", ())]), expected):
        raise CorruptFileError(f"{path} does not hold the images of shard {number}/{count}: write it again")
    return part


def _refuse_bomb(path: Path) -> None:
    """Reject a zip bomb, which compresses a thousandfold; embeddings and padded texts compress far less."""
    if not zipfile.is_zipfile(path):  # NumPy rejects it
        return
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > max(_UNPACKED, _COMPRESSION * path.stat().st_size):
        raise ValueError(f"it would unpack to {unpacked / 2**20:,.0f} MiB, more than {_COMPRESSION} times its size")


def _refuse_others(parts: dict[Path, dict[str, np.ndarray]], encoder: str) -> None:
    first = next(iter(parts))
    seen: dict[int, Path] = {}
    count = int(parts[first]["shard"][1])
    for path, part in parts.items():
        if str(part["encoder"]) != encoder:
            raise ValueError(
                f"{path} was embedded by another network, posterior or preprocessing than this run's: embed it again"
            )
        number, of = part["shard"].tolist()
        if of != count:
            raise ValueError(f"{path} is shard {number}/{of}, but {first} is one of {count}: give shards of one count")
        if str(part["listing"]) != str(parts[first]["listing"]) or int(part["total"]) != int(parts[first]["total"]):
            raise ValueError(f"{path} and {first} come from other folders, or images have changed: embed again")
        if part["mean"].shape[1] != parts[first]["mean"].shape[1]:
            widths = part["mean"].shape[1], parts[first]["mean"].shape[1]
            raise ValueError(f"{path} has dimension {widths[0]}, {first} {widths[1]}: embed again")
        if number in seen:
            raise ValueError(f"shard {number}/{of} is given twice: {seen[number]} and {path}")
        seen[number] = path
    if missing := sorted(set(range(1, count + 1)) - seen.keys()):
        raise ValueError(f"{len(missing)} of {count} shards are missing, such as {missing[0]}/{count}")

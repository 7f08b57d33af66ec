"""A bounded sample of what a service was asked, as embeddings: known queries and strangers, as they come.

`live/` of a run is a sealed generation: live.json (how many were asked, of which encoder) and queries.safetensors.
"""

import random

import torch
from jaxtyping import Float
from torch import Tensor

from lam.runs.finished import Run
from lam.utils.checks import check_at_least
from lam.utils.files import MANIFEST, FolderFormat
from lam.vmf.embeddings import Embeddings

FOLDER = "live"
FORMAT = FolderFormat(1, "live.json", ("queries.safetensors",))
EVERY = 100
"""After so many queries more the sample is written."""


class LiveQueries:
    """A uniform sample of at most so many queries, whatever number comes; it goes on where an earlier one ended.

    An earlier one that has let queries go stays as small as it is.

    Source: Vitter (1985), algorithm R.

    Args:
        run: that is asked.
        size: how many queries are kept.

    Attributes:
        seen: how many came.

    Raises:
        ValueError: for a size below 1.
        CorruptFileError: naming a file of an earlier sample that is missing, truncated or altered.
    """

    def __init__(self, run: Run, size: int) -> None:
        check_at_least("how many queries are kept", size, 1)
        self._run, self._size = run, size
        self.seen = self._unwritten = 0
        self._kept: list[tuple[Embeddings, Tensor]] = []
        if (earlier := _read(run)) is not None:
            embeddings, features, self.seen = earlier
            n = len(embeddings)
            if self.seen > n:  # more beside them would all be late ones
                self._size = min(size, n)
            rows = sorted(random.sample(range(n), min(size, n)))
            self._kept = [(embeddings[row : row + 1], features[row : row + 1]) for row in rows]

    def add(self, embedding: Embeddings, features: Float[Tensor, "1 P"]) -> None:
        """Count a query, which may take the place of another."""
        self.seen += 1
        if len(self._kept) < self._size:
            self._kept.append((embedding, features))
        elif (place := random.randrange(self.seen)) < self._size:
            self._kept[place] = embedding, features
        self._unwritten += 1
        if self._unwritten >= EVERY:
            self.write()

    def write(self) -> None:
        """Write what was not written yet; a crash leaves the earlier sample, or all of this."""
        if not self._unwritten:
            return
        embeddings = Embeddings.concatenate([embedding for embedding, _ in self._kept])
        tensors = {**embeddings.rows(), "features": torch.cat([features for _, features in self._kept])}
        metadata = {"key": self._run.fingerprint, "seen": self.seen, "mean_samples": embeddings.mean_samples}
        FORMAT.write(self._run.folder / FOLDER, metadata, tensors)
        self._unwritten = 0


def live_queries(run: Run) -> tuple[Embeddings, Float[Tensor, "O P"]]:
    """The queries that were kept, and their features.

    Raises:
        ValueError: where none were kept of the run's encoder.
        CorruptFileError: naming the file that is missing, truncated or altered.
    """
    kept = _read(run)
    if kept is None:
        raise ValueError(f"no queries to the run in {run.folder} were kept: `lam serve --keep-queries 2000` keeps them")
    return kept[0], kept[1]


def _read(run: Run) -> tuple[Embeddings, Tensor, int] | None:
    """Embeddings, features, and of how many queries they are a sample; None where there are none of this encoder."""
    folder = run.folder / FOLDER
    if not (folder / MANIFEST).is_file():
        return None
    metadata, tensors = FORMAT.read(folder)
    if metadata["key"] != run.fingerprint:
        return None
    features = tensors.pop("features")
    return Embeddings(**tensors, mean_samples=metadata["mean_samples"]), features, metadata["seen"]

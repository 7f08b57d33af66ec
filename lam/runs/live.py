"""A random sample of a service's queries (known ones and strangers) as embeddings.

A run's folder `live/` holds live.json (number of queries, hash of the encoder) and queries.safetensors.
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
EVERY = 100  # number of queries between two writes of the sample


class LiveQueries:
    """A uniform random sample of at most `size` queries. It continues the earlier sample in the run's folder.

    Once a sample has dropped queries, a larger `size` has no effect, because later queries would be over-represented.
    `seen` is the number of all queries so far.

    Source: Vitter (1985), algorithm R.
    """

    def __init__(self, run: Run, size: int) -> None:
        check_at_least("the number of queries to keep", size, 1)
        self._run, self._size = run, size
        self.seen = self._unwritten = 0
        self._kept: list[tuple[Embeddings, Tensor]] = []
        if (earlier := _read(run)) is not None:
            embeddings, features, self.seen = earlier
            n = len(embeddings)
            if self.seen > n:
                self._size = min(size, n)
            rows = sorted(random.sample(range(n), min(size, n)))
            self._kept = [(embeddings[row : row + 1], features[row : row + 1]) for row in rows]

    def add(self, embedding: Embeddings, features: Float[Tensor, "1 P"]) -> None:
        """Count a query and add it; in a full sample, the query replaces a random one with probability size/seen."""
        self.seen += 1
        place = len(self._kept) if len(self._kept) < self._size else random.randrange(self.seen)
        if place < self._size:  # copied, because a view would keep its whole batch in memory
            self._kept[place : place + 1] = [(embedding[torch.zeros(1, dtype=torch.int64)], features.clone())]
        self._unwritten += 1
        if self._unwritten % EVERY == 0:  # a failed write is tried again only after as many more queries
            self.write()

    def write(self) -> None:
        """Write the sample if it has changed; after a crash, the folder holds the earlier sample or the new one.

        If the run's folder was moved or replaced, a `FileNotFoundError` says so.
        """
        if not self._unwritten:
            return
        if not self._run.is_in_place:
            raise FileNotFoundError(f"the run's folder was moved from {self._run.folder} or replaced")
        embeddings = Embeddings.concatenate([embedding for embedding, _ in self._kept])
        tensors = {**embeddings.rows(), "features": torch.cat([features for _, features in self._kept])}
        metadata = {"key": self._run.fingerprint, "seen": self.seen, "mean_samples": embeddings.mean_samples}
        FORMAT.write(self._run.folder / FOLDER, metadata, tensors)
        self._unwritten = 0


def live_queries(run: Run) -> tuple[Embeddings, Float[Tensor, "O P"]]:
    """The O sampled queries and their features."""
    kept = _read(run)
    if kept is None:
        raise ValueError(
            f"no queries to the run in {run.folder} were kept: `lam serve --keep-queries 2000` keeps them, and writes "
            f"them at its end and after every {EVERY} queries"
        )
    return kept[0], kept[1]


def _read(run: Run) -> tuple[Embeddings, Tensor, int] | None:
    """Embeddings, features and the number of all queries; None without a sample of this encoder."""
    folder = run.folder / FOLDER
    if not (folder / MANIFEST).is_file():
        return None
    metadata, tensors = FORMAT.read(folder)  # a service may be writing
    if metadata["key"] != run.fingerprint:
        return None
    features = tensors.pop("features")
    return Embeddings(**tensors, mean_samples=metadata["mean_samples"]), features, metadata["seen"]

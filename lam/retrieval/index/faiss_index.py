"""A searchable collection of embeddings with their κ, on any FAISS index type.

FAISS proposes candidates; types that compare codes (PQ, RaBitQ, SQ) propose several for each hit. `Index` scores the
candidates by exact cosines of the stored vectors. A query with too few candidates is searched exactly.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lam.retrieval.index import faiss_calls
from lam.retrieval.index import files as index_files
from lam.retrieval.index.checks import Ids, check_stored, ids_tensor, unit_vectors
from lam.retrieval.index.hits import Hits, Recall
from lam.retrieval.index.milvus_index import MilvusIndex
from lam.retrieval.index.rows import TOMBSTONES, Found, Store, score, top
from lam.utils.checks import check_at_least, check_length, positive_integer
from lam.vmf.embeddings import Embeddings, check_same_means

_ROUGH, _LEAST_ROUGH = 4, 200  # for types that compare codes: candidates for each hit, and least number of candidates
_FEW = 20_000  # up to this many ids are searched exactly, because a graph misses hits if most of its nodes are hidden


class Index:
    """Items with unit vectors, κ and ids, searched by cosine.

    Vectors are stored in float32, κ in float64. For types other than Flat, and on a GPU, FAISS holds a copy of the
    vectors or their codes. One thread at a time may use an index.

    Args:
        dimension: embedding dimension D, at least 1.
        factory: a FAISS factory string, such as "Flat" (exact), "HNSW32" or "IVF256,Flat", without "IDMap".
        parameters: FAISS search parameters such as "nprobe=16"; by default as in FAISS, but HNSW and IVF search wider.
        device: device of the FAISS index: "cpu", or "cuda" or "cuda:1" with faiss-gpu. Tensors may be on any device.

    Attributes:
        mean_samples: S if vectors are mean directions of S samples; None if they are directions of network outputs.

    Raises:
        ValueError: for a dimension below 1, or a type, parameters or device that FAISS does not know or cannot combine.

    Example:
        >>> n = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> embeddings = Embeddings(n, torch.tensor([90.0, 4.0]), torch.ones(2), torch.ones(2))
        >>> index = Index(2)
        >>> index.add(embeddings, torch.tensor([7, 9]))
        >>> hits = index.search(embeddings[:1], k=5)
        >>> hits.ids.tolist(), hits.scores.tolist(), hits.kappa.tolist()
        ([[7, 9]], [[1.0, 0.0]], [[90.0, 4.0]])
    """

    def __init__(
        self, dimension: SupportsIndex, factory: str = "Flat", *, parameters: str | None = None, device: str = "cpu"
    ) -> None:
        self.dimension = positive_integer("dimension", dimension)
        self.factory = factory
        self.parameters = parameters
        self.device = device
        self.mean_samples: int | None = None
        self._store = Store(self.dimension)
        self._faiss: Any = self._structure()

    def __repr__(self) -> str:
        return f"Index({self.dimension}, {self.factory!r}, {len(self)} items)"

    def __len__(self) -> int:
        return len(self._store)

    def __contains__(self, item: int) -> bool:
        return item in self._store

    @property
    def ids(self) -> Int64[Tensor, " N"]:
        """(N,) the ids, in the order of adding."""
        return torch.from_numpy(self._store.column("ids"))

    @property
    def holds_removed(self) -> bool:
        """Whether FAISS and a saved index still hold removed vectors. FAISS types without removal do."""
        return self._faiss is not None and self._faiss.ntotal > len(self)

    @property
    def is_trained(self) -> bool:
        """Whether items can be added: types that quantise or cluster must be trained first."""
        return self._faiss is None or bool(self._faiss.is_trained)

    def train(self, embeddings: Embeddings) -> None:
        """Train on typical embeddings, without adding them; only checks the embeddings if no training is needed.

        Raises:
            ValueError: for invalid or too few embeddings, or if the index already holds items.
        """
        vectors = unit_vectors(embeddings, self.dimension).numpy()
        if len(self):
            raise ValueError(f"train the index before items are added: it holds {len(self)}; make a new one instead")
        if self._faiss is not None:
            faiss_calls.train(self._faiss, vectors)

    def add(self, embeddings: Embeddings, ids: Ids) -> None:
        """Add items: all of them, or none if an error is raised.

        Args:
            embeddings: N embeddings of dimension D with unit means and finite κ ≥ 0.
            ids: (N,) a tensor, array or sequence of integers ≥ 0 that are new to the index.

        Raises:
            ValueError: for invalid embeddings or ids, another `mean_samples`, an untrained type, or an error of FAISS.
        """
        if len(self):
            check_same_means(embeddings, self.mean_samples)
        vectors = unit_vectors(embeddings, self.dimension).numpy()
        ids = ids_tensor(ids)
        check_length("ids", ids, "the embeddings", len(embeddings))
        taken = [item for item in ids.tolist() if item in self._store]
        if taken:
            raise ValueError(f"ids must be new, got {taken[0]}, which is in the index; remove it first")
        if not self.is_trained:
            raise ValueError(f"an index of type {self.factory!r} must be trained first: call train with embeddings")
        if len(ids) == 0:
            return
        slots = self._store.take_slots(len(ids))
        if self._faiss is not None:
            try:
                faiss_calls.add(self._faiss, vectors, slots)
            except Exception:
                self._faiss = self._rebuilt()
                raise
        self._store.append(vectors, embeddings.kappa.detach().cpu().double().numpy(), ids.numpy(), slots)
        self.mean_samples = embeddings.mean_samples

    def remove(self, ids: Ids, *, sweeps: bool = True) -> None:
        """Remove items: all of them, or none if an error is raised.

        Flat, and FAISS types without removal, hide removed rows from searches. Flat drops the hidden rows of a chunk
        once they are 20 %. A type without removal is rebuilt once 20 % of all rows are hidden.

        Args:
            ids: (N,) distinct ids in the index.
            sweeps: whether to rebuild now, if needed; if False, call `sweep` later.

        Raises:
            ValueError: for ids that are repeated or not in the index.
        """
        slots = self._store.slots_of(self._stored_ids(ids))
        if len(slots) == 0:
            return
        self._store.remove(slots)
        if self._faiss is None:
            return
        faiss_calls.remove(self._faiss, slots)
        if sweeps:
            self.sweep()

    def sweep(self, lock: AbstractContextManager[Any] | None = None) -> None:
        """Rebuild a type without removal if at least 20 % of its rows are hidden.

        Args:
            lock: held while the new structure replaces the old one. During the rebuild, other threads may search, but
                not add or remove items.
        """
        if self._faiss is not None and self._faiss.ntotal - len(self) >= TOMBSTONES * self._faiss.ntotal > 0:
            rebuilt = self._rebuilt()
            with nullcontext() if lock is None else lock:
                self._faiss = rebuilt

    def search(
        self, embeddings: Embeddings, k: SupportsIndex, *, least_kappa: float | None = None, among: Ids | None = None
    ) -> Hits:
        """The k items of highest cosine for each query; hits of equal cosine are in the order of adding.

        Any type except Flat may miss a neighbour, but every score is the exact cosine of the stored vectors.

        Args:
            embeddings: Q queries of dimension D with unit means and finite κ ≥ 0.
            k: number of hits, at least 1.
            least_kappa: least κ of a hit.
            among: ids of the items to search; unknown ids are ignored. None for all items.

        Returns:
            min(k, N) hits for each query among N searched items, on the device and in the precision of the queries.

        Raises:
            ValueError: for k below 1 or beyond FAISS's limit on a GPU, a negative `least_kappa`, another dimension, or
                a query that is not a unit vector or has another number of samples than the index.
        """
        if len(self):
            check_same_means(embeddings, self.mean_samples)
        check_at_least("least_kappa", least_kappa, 0.0)
        k, least_kappa = positive_integer("k", k), least_kappa or 0.0
        vectors = unit_vectors(embeddings, self.dimension).numpy()
        if among is None:
            return _hits(*self._search(vectors, k, least_kappa), embeddings)
        ids = np.sort(ids_tensor(among).numpy(), kind="stable")  # fast for sorted ids
        return _hits(*self._search_among(vectors, k, least_kappa, ids), embeddings)

    def measure_recall(
        self, *, n_queries: SupportsIndex = 200, k: SupportsIndex = 10, depth: SupportsIndex = 50
    ) -> Recall | None:
        """Agreement with an exact search for `n_queries` random items; None for an index of fewer than two items.

        k and `depth` are as in `Recall`. The agreement may be less for queries far from all items.
        """
        count, k, depth = (
            positive_integer(name, value) for name, value in (("n_queries", n_queries), ("k", k), ("depth", depth))
        )
        if len(self) < 2:
            return None
        ids = self._store.column("ids")
        own = np.random.default_rng(0).permutation(ids)[:count]
        vectors = self._store.of_ids("vectors", torch.from_numpy(own))
        hits = min(max(k, depth) + 1, len(self))
        exact = self._store.search(vectors, hits, 0.0)
        found = exact if self._faiss is None else self._search(vectors, hits, 0.0)
        return Recall.of(self.factory, own, found, exact, k=k, depth=depth)

    def kappa_of(self, ids: Ids) -> Float[Tensor, " N"]:
        """(N,) stored concentrations of N ids, float64.

        Raises:
            ValueError: for ids that are repeated or not in the index.
        """
        return torch.from_numpy(self._store.of_ids("kappa", self._stored_ids(ids)))

    def save(self, folder: str | Path) -> None:
        """Write the index into a folder. After a crash, the folder holds the old index or the new one.

        Args:
            folder: created if missing. One process at a time may write to it.

        Raises:
            ValueError: if the folder holds something else, such as an encoder.
        """
        settings = {name: getattr(self, name) for name in index_files.SETTINGS}
        index_files.save(folder, settings, self._store, self._faiss)

    @classmethod
    def open(cls, address: str | Path, *, device: str = "cpu") -> "Index | MilvusIndex":
        """Open an index that `save` wrote, or an existing collection of a Milvus server.

        Args:
            address: a folder, or the address of a `lam.retrieval.index.milvus_index.MilvusIndex`.
            device: as for `Index`; only an index in a folder uses it.

        Raises:
            ValueError, CorruptFileError, ConnectionError: as `load`, or as a new `MilvusIndex`.
        """
        if not str(address).startswith(("milvus://", "milvus+tls://")):
            return cls.load(address, device=device)
        return MilvusIndex(str(address))

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu") -> "Index":
        """Read an index that `save` wrote.

        If another process replaces the index meanwhile, the new index is read. The FAISS structure is a cache: if its
        file is missing or unusable, `load` warns and rebuilds the structure from the stored embeddings. A type that
        needs training is trained on these embeddings; with too few embeddings, the index becomes Flat.

        Args:
            folder: folder of the index.
            device: as for `Index`.

        Raises:
            CorruptFileError: if a file of embeddings or metadata is missing, truncated or altered.
            ValueError: for a folder in a later format.
        """
        settings, store, structure, problem = index_files.load(folder)
        index = cls(store.dimension, settings["factory"], parameters=settings["parameters"], device=device)
        index._store, index.mean_samples = store, settings["mean_samples"]
        if structure is not None and index._faiss is not None:
            index._faiss = faiss_calls.prepare(structure, index.parameters, device)
            return index
        if problem is not None:
            warnings.warn(f"{problem}: it is built anew from the stored embeddings", RuntimeWarning, stacklevel=2)
            if not index.is_trained and len(index):
                index._retrain()
        index._faiss = index._rebuilt()  # also for Flat that was saved on a CPU: a GPU needs a structure
        return index

    def _retrain(self) -> None:
        try:
            faiss_calls.train(self._faiss, self._store.column("vectors"))
        except ValueError as error:
            warnings.warn(f"{error}; the index is Flat from now on", RuntimeWarning, stacklevel=3)
            self.factory, self.parameters = "Flat", None
            self._faiss = self._structure()

    def _structure(self) -> Any:
        """An empty FAISS index; None for Flat on the CPU, which needs only the stored rows."""
        if (self.factory, self.parameters, self.device) == ("Flat", None, "cpu"):
            return None
        return faiss_calls.create(self.dimension, self.factory, self.parameters, self.device)

    def _rebuilt(self) -> Any:
        """A new FAISS index of the stored rows; None for Flat on the CPU."""
        if self._faiss is None:
            return None
        rebuilt = faiss_calls.empty_copy(self._faiss, self.device)
        if len(self):
            faiss_calls.add(rebuilt, self._store.column("vectors"), self._store.column("slots"))
        return rebuilt

    def _search(self, vectors: np.ndarray, k: int, least_kappa: float) -> Found:
        """The k best rows with κ ≥ `least_kappa`; queries with too few candidates are searched exactly."""
        n_allowed = self._store.count(least_kappa)
        k = min(k, n_allowed)
        if self._faiss is None or k == 0:
            return self._store.search(vectors, k, least_kappa)
        # one more candidate for each hidden row, but at most twice as many candidates
        wanted = self._candidates(k)
        n_candidates = min(wanted + min(wanted, self._faiss.ntotal - n_allowed), self._faiss.ntotal)
        candidates = self._store.places_of(faiss_calls.search(self._faiss, vectors, n_candidates))
        if least_kappa:
            kappa = self._store.take("kappa", candidates.clip(min=0))
            candidates = np.where(kappa >= least_kappa, candidates, -1)
        scores, places = self._store.best(k, vectors, candidates)
        found, lacks_hits = self._found(scores, places.clip(min=0)), places[:, -1] < 0  # missing places come last
        if lacks_hits.any():
            for column, exact in zip(found, self._store.search(vectors[lacks_hits], k, least_kappa), strict=True):
                column[lacks_hits] = exact
        return found

    def _search_among(self, vectors: np.ndarray, k: int, least_kappa: float, among: np.ndarray) -> Found:
        """The k best rows among sorted ids, by FAISS's selector for more than 20,000 ids and exactly for fewer."""
        if self._faiss is not None and self.device == "cpu" and len(among) > _FEW:
            searched = self._store.places(least_kappa, among)
            if len(searched) > _FEW and (found := self._select(vectors, min(k, len(searched)), searched)) is not None:
                return found
        return self._store.search(vectors, k, least_kappa, among)

    def _select(self, vectors: np.ndarray, k: int, searched: np.ndarray) -> Found | None:
        """The k best of the rows at `searched`; None if the type has no selector, or a query gets fewer than k rows."""
        slots = self._store.take("slots", searched)
        wanted = min(max(2 * k, self._candidates(k)), len(searched))
        candidates = faiss_calls.search_among(self._faiss, vectors, wanted, slots)
        if candidates is None or ((places := self._store.places_of(candidates)) >= 0).sum(axis=1).min(initial=k) < k:
            return None
        return self._found(*self._store.best(k, vectors, places))

    def _candidates(self, k: int) -> int:
        """Number of candidates for k hits; k itself on a GPU, because GPUs limit the number."""
        is_rough = self.device == "cpu" and faiss_calls.compares_codes(self.dimension, self.factory)
        return max(_ROUGH * k, _LEAST_ROUGH) if is_rough else k

    def _found(self, scores: np.ndarray, places: np.ndarray) -> Found:
        return self._store.take("ids", places), scores.clip(-1, 1), self._store.take("kappa", places)

    def _stored_ids(self, ids: Any) -> Tensor:
        ids = ids_tensor(ids)
        check_stored(ids.tolist(), self._store)
        return ids


def search_flat(items: Embeddings, queries: Embeddings, k: SupportsIndex) -> Hits:
    """Hits as from a Flat `Index` of the items, without a copy of the vectors; ids of hits are positions in `items`.

    The N ≥ 1 items must be float32 unit vectors; this is not checked.
    """
    k = min(positive_integer("k", k), len(items))
    stored, vectors = items.mean.numpy(), unit_vectors(queries, items.dimension).numpy()
    with faiss_calls.matrix_product(len(vectors)):
        rows = np.empty((0, k), np.int64) if len(vectors) == 0 else faiss_calls.nearest(stored, vectors, k)[1]
    rows, scores = score(stored.__getitem__, vectors, rows)
    scores, rows = top(k, scores, rows)
    return _hits(rows, scores.clip(-1, 1), items.kappa.numpy()[rows], queries)


def _hits(ids: np.ndarray, scores: np.ndarray, kappa: np.ndarray, queries: Embeddings) -> Hits:
    """Hits on the device and in the precision of the queries."""
    return Hits(
        torch.from_numpy(ids).to(queries.mean.device),
        torch.from_numpy(scores).to(queries.mean),
        torch.from_numpy(kappa).to(queries.kappa),
    )

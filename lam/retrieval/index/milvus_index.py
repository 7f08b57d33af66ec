"""An index on a Milvus server, for galleries too large for one machine, or in a file of Milvus Lite.

A collection has the fields `id` (the primary key), `vector`, `kappa` and `mean_samples` (0 if vectors are
directions of network outputs). Methods and checks are as in `lam.retrieval.Index`, without `save`, because the server
stores items.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, SupportsIndex, get_args

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lam.retrieval.index.checks import Ids, check_stored, ids_tensor, unit_vectors
from lam.retrieval.index.hits import Hits
from lam.utils.checks import check_at_least, check_choice, check_length, check_positive, positive_integer
from lam.utils.extras import install_command
from lam.vmf.embeddings import Embeddings, check_same_means

Structure = Literal["FLAT", "HNSW"]
"""Search structure on the server: `FLAT` compares all vectors, `HNSW` follows a graph. Both return exact cosines."""

TOKEN = "LAM_MILVUS_TOKEN"
"""Environment variable with the `user:password` or API key of the server, if the server needs one."""

TIMEOUT = 10.0
MOST_HITS = 16384
"""Greatest number of hits that a Milvus server returns."""

GREATEST_ID = 2**63 - 2
"""Greatest id that a Milvus server can look up; it can store and search greater ones."""

_PORT = 19530
_ADDRESS = re.compile(
    r"milvus(?P<tls>\+tls)?://(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#]+)(?::(?P<port>\d+))?|(?P<file>/[^?#]+\.db))"
    r"/(?P<collection>[A-Za-z_][A-Za-z0-9_]{0,254})"
)
_FIELDS = {"id", "vector", "kappa", "mean_samples"}
_MESSAGE_ELEMENTS = 2**22  # coordinates in one message: 16 MiB, where a server accepts 64
_MESSAGE_IDS = 1000
_LISTED = 5000  # ids in the condition of one search
_ROWS = MOST_HITS  # hits of all queries in a deeper search, from which ids are chosen: this takes 0.6 s
_FORMS = "milvus://HOST[:PORT]/COLLECTION, milvus+tls://HOST[:PORT]/COLLECTION or milvus:///FILE.db/COLLECTION"


_Hit = tuple[int, float, float]
"""Id, cosine and κ of a hit."""


@dataclass(frozen=True)
class Address:
    """Address of a collection, on a server or in a file of Milvus Lite."""

    uri: str
    collection: str
    server: str  # for error messages

    @classmethod
    def parse(cls, address: str) -> "Address":
        """Parse an address; see `MilvusIndex`.

        Raises:
            ValueError: for an address of another form or with a password, or a name that Milvus does not allow.

        Example:
            >>> Address.parse("milvus://db.example/items")
            Address(uri='http://db.example:19530', collection='items', server='db.example:19530')
            >>> Address.parse("milvus:///tmp/items.db/faces").uri
            '/tmp/items.db'
        """
        if "@" in address.partition("://")[2].partition("/")[0]:
            raise ValueError(f"address must hold no password: put USER:PASSWORD into the environment variable {TOKEN}")
        parts = _ADDRESS.fullmatch(address)
        port = int(parts["port"] or _PORT) if parts else 0
        if parts is None or not 0 < port < 2**16 or (parts["tls"] and parts["file"]):
            raise ValueError(
                f"address must be {_FORMS}, with a collection name of letters, digits and _ that does not begin with a "
                f"digit, and a port from 1 to 65535, got {address!r}"
            )
        if parts["file"]:
            return cls(parts["file"], parts["collection"], parts["file"])
        server = f"{parts['host'].lower()}:{port}"
        return cls(f"{'https' if parts['tls'] else 'http'}://{server}", parts["collection"], server)


class MilvusIndex:
    """Items with unit vectors, κ and ids in a Milvus collection, searched by cosine.

    Vectors are stored in float32, κ in float64. Several processes may share a collection and see each other's items.
    Hits of equal cosine are in rising order of their ids.

    Args:
        address: `milvus://HOST[:PORT]/COLLECTION`, with `milvus+tls` for an encrypted connection; or
            `milvus:///FILE.db/COLLECTION` for a file of Milvus Lite (an absolute path), used by one process at a time.
        dimension: embedding dimension of a new collection; None for an existing one.
        structure: search structure of a new collection.
        timeout: seconds to wait for an answer of the server.

    Raises:
        ValueError: for a wrong address, a missing collection if no dimension is given, a dimension that differs from
            the stored one, or a missing pymilvus.
        ConnectionError: if the file cannot be opened; in every method, if the server refuses or does not answer.
    """

    def __init__(
        self,
        address: str,
        dimension: SupportsIndex | None = None,
        *,
        structure: Structure = "FLAT",
        timeout: float = TIMEOUT,
    ) -> None:
        dimension = None if dimension is None else positive_integer("dimension", dimension)
        check_choice("structure", structure, get_args(Structure))
        check_positive("timeout", timeout)
        self.address = Address.parse(address)
        self.timeout = timeout
        self._client = self._connect()
        try:
            self.dimension = self._open_collection(dimension, structure)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return int(self._call("query", output_fields=["count(*)"])[0]["count(*)"])

    @property
    def ids(self) -> Int64[Tensor, " N"]:
        """(N,) the ids, in rising order; reads all ids from the server."""
        with self._connection_errors():
            batches = self._client.query_iterator(
                self.address.collection, batch_size=MOST_HITS, output_fields=["id"], timeout=self.timeout
            )
            ids: list[int] = []
            while rows := batches.next():
                ids += [row["id"] for row in rows]
            batches.close()
        return torch.tensor(sorted(ids), dtype=torch.int64)

    @property
    def is_trained(self) -> bool:
        """True, because neither search structure needs training."""
        return True

    def train(self, embeddings: Embeddings) -> None:
        """Check the embeddings; there is nothing to train."""
        unit_vectors(embeddings, self.dimension)

    def add(self, embeddings: Embeddings, ids: Ids) -> None:
        """Add items; arguments and errors as for `Index.add`, with ids up to `GREATEST_ID`.

        If the server refuses some items, `add` tries to remove all new items again. If another process adds the same id
        at the same moment, the later item stays.
        """
        rows = self._rows(embeddings, ids)
        new_ids = [row["id"] for row in rows]
        if taken := self._kappa_by_id(new_ids):
            raise ValueError(f"ids must be new, got {min(taken)}, which is in the index; remove it first")
        try:
            self._send(rows)
        except ConnectionError:
            with suppress(ConnectionError):  # the first error is the one to report
                self._delete(new_ids)
            raise

    def put(self, embeddings: Embeddings, ids: Ids) -> None:
        """Add items, replacing stored items of the same ids; arguments as for `add`.

        After a `ConnectionError` some items may be stored; repeating the call is safe.
        """
        self._send(self._rows(embeddings, ids))

    def remove(self, ids: Ids) -> None:
        """Remove items: all of them, or none if an id is unknown; errors as for `Index.remove`."""
        self._delete(list(self._kappa_by_id(ids_tensor(ids).tolist(), all_stored=True)))

    def discard(self, ids: Ids) -> None:
        """Remove items; ids that are not in the index have no effect, repeated ids raise a `ValueError`.

        After a `ConnectionError` some items may be removed; repeating the call is safe.
        """
        self._delete(ids_tensor(ids).tolist())

    def search(
        self, embeddings: Embeddings, k: SupportsIndex, *, least_kappa: float | None = None, among: Ids | None = None
    ) -> Hits:
        """The k ≤ `MOST_HITS` items of highest cosine for each query; arguments and errors as for `Index.search`.

        `HNSW` may miss neighbours. All queries get the same number of hits: the least number found for any query.
        """
        k = positive_integer("k", k)
        if k > MOST_HITS:
            raise ValueError(f"k must be at most {MOST_HITS}, the most that Milvus returns, got {k}")
        check_at_least("least_kappa", least_kappa, 0.0)
        conditions = [f"kappa >= {float(least_kappa)!r}"] if least_kappa else []
        if among is None:
            hits = self._found(embeddings, k, conditions)
        else:
            hits = self._found_among(embeddings, k, conditions, ids_tensor(among).tolist())
        k = min(map(len, hits), default=0)
        ids, scores, kappa = (
            torch.tensor([[hit[column] for hit in row[:k]] for row in hits], dtype=dtype).reshape(len(hits), k)
            for column, dtype in enumerate((torch.int64, torch.float64, torch.float64))
        )
        mean = embeddings.mean
        return Hits(ids.to(mean.device), scores.clamp(-1, 1).to(mean), kappa.to(embeddings.kappa))

    def kappa_of(self, ids: Ids) -> Float64[Tensor, " N"]:
        """(N,) stored concentrations of N ids; errors as for `Index.kappa_of`."""
        known = ids_tensor(ids).tolist()
        kappa = self._kappa_by_id(known, all_stored=True)
        return torch.tensor([kappa[item] for item in known], dtype=torch.float64)

    def close(self) -> None:
        """Close the connection; the items stay."""
        self._client.close()

    def _found(self, embeddings: Embeddings, k: int, conditions: Sequence[str]) -> list[list[_Hit]]:
        """Up to k hits of each query that meet the conditions, best first."""
        vectors = unit_vectors(embeddings, self.dimension).numpy()
        options: dict[str, Any] = {"limit": k, "anns_field": "vector", "output_fields": ["kappa", "mean_samples"]}
        options["search_params"] = {"params": {"ef": max(64, 2 * k)}}  # HNSW needs ef ≥ k; a greater ef misses fewer
        if conditions:
            options["filter"] = " and ".join(conditions)
        hits: list[list[_Hit]] = []
        for block in _blocks(list(vectors), max(1, min(MOST_HITS, _MESSAGE_ELEMENTS // max(self.dimension, 2 * k)))):
            answers = self._call("search", data=block, **options)
            _check_same_means(embeddings, (hit["entity"] for answer in answers for hit in answer))
            for answer in answers:
                hits.append(_best(k, ((hit["id"], hit["distance"], hit["entity"]["kappa"]) for hit in answer)))
        return hits

    def _found_among(
        self, embeddings: Embeddings, k: int, conditions: Sequence[str], among: Sequence[int]
    ) -> list[list[_Hit]]:
        """Up to k hits of each query among these ids, best first.

        Milvus takes 4 s to read a condition with 100,000 ids. So many ids first choose among the hits of a deeper
        search. If some query has too few of these hits, a search for each block of ids finds the others.
        """
        blocks = list(_blocks(among, _LISTED)) or [among]
        allowed, depth, most = set(among), 2 * k, _ROWS // max(1, len(embeddings))
        while len(blocks) > 1 and depth <= most:
            found = self._found(embeddings, depth, conditions)
            hits = [[hit for hit in row if hit[0] in allowed][:k] for row in found]
            if all(len(few) == k or len(row) < depth for few, row in zip(hits, found, strict=True)):
                return hits
            depth *= 4
        parts = [self._found(embeddings, k, [*conditions, f"id in {block}"]) for block in blocks]
        return [_best(k, chain.from_iterable(rows)) for rows in zip(*parts, strict=True)]

    def _connect(self) -> Any:
        try:
            import pymilvus
        except ImportError as error:
            raise ValueError(f"pymilvus cannot be imported ({error}): {install_command('milvus')}") from None
        path = Path(self.address.uri)
        if path.is_absolute() and not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path.name}: make it first")
        with self._connection_errors():
            return pymilvus.MilvusClient(self.address.uri, token=os.environ.get(TOKEN, ""), timeout=self.timeout)

    def _open_collection(self, dimension: int | None, structure: str) -> int:
        name = f"collection {self.address.collection!r} in {self.address.server}"
        if not self._call("has_collection"):
            if dimension is None:
                raise ValueError(f"there is no {name}: give MilvusIndex a dimension to make it")
            self._make(dimension, structure)
        fields = {field["name"]: field for field in self._call("describe_collection")["fields"]}
        if fields.keys() != _FIELDS:
            raise ValueError(
                f"the {name} is not an index of lam: it must have the fields {', '.join(sorted(_FIELDS))}, "
                f"got {', '.join(sorted(fields))}"
            )
        stored_dimension = int(fields["vector"]["params"]["dim"])
        if dimension not in (None, stored_dimension):
            raise ValueError(
                f"the {name} holds vectors of dimension {stored_dimension}, got {dimension}: name another collection"
            )
        self._call("load_collection")
        return stored_dimension

    def _make(self, dimension: int, structure: str) -> None:
        import pymilvus

        kind = pymilvus.DataType
        with self._connection_errors():
            schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field("id", kind.INT64, is_primary=True)
            schema.add_field("vector", kind.FLOAT_VECTOR, dim=dimension)
            schema.add_field("kappa", kind.DOUBLE)
            schema.add_field("mean_samples", kind.INT64)
            index = self._client.prepare_index_params()
            params = {"M": 32, "efConstruction": 200} if structure == "HNSW" else {}
            index.add_index("vector", index_type=structure, metric_type="COSINE", params=params)
        self._call("create_collection", schema=schema, index_params=index, consistency_level="Strong")

    def _rows(self, embeddings: Embeddings, ids: Any) -> list[dict[str, Any]]:
        vectors = unit_vectors(embeddings, self.dimension).numpy()
        ids = ids_tensor(ids)
        check_length("ids", ids, "the embeddings", len(embeddings))
        if (ids > GREATEST_ID).any():
            raise ValueError(
                f"ids must be at most {GREATEST_ID}, the greatest that Milvus finds again, got {ids.max()}"
            )
        stored = self._call("query", filter="id >= 0", limit=1, output_fields=["mean_samples"])
        _check_same_means(embeddings, stored)
        kappa = embeddings.kappa.detach().cpu().double().tolist()
        mean_samples = embeddings.mean_samples or 0
        return [
            {"id": item, "vector": vector, "kappa": value, "mean_samples": mean_samples}
            for item, vector, value in zip(ids.tolist(), vectors, kappa, strict=True)
        ]

    def _send(self, rows: list[dict[str, Any]]) -> None:
        for block in _blocks(rows, max(1, _MESSAGE_ELEMENTS // self.dimension)):
            self._call("upsert", data=block)

    def _delete(self, ids: list[int]) -> None:
        for block in _blocks(ids, _MESSAGE_IDS):
            self._call("delete", ids=block)

    def _kappa_by_id(self, ids: list[int], *, all_stored: bool = False) -> dict[int, float]:
        """κ by id, for the stored ids; with `all_stored`, an unknown id raises a `ValueError`."""
        kappa: dict[int, float] = {}
        for block in _blocks(ids, _MESSAGE_IDS):
            rows = self._call("query", filter=f"id in {block}", output_fields=["id", "kappa"])
            kappa |= {row["id"]: row["kappa"] for row in rows}
        if all_stored:
            check_stored(ids, kappa)
        return kappa

    def _call(self, name: str, **options: Any) -> Any:
        with self._connection_errors():
            return getattr(self._client, name)(self.address.collection, timeout=self.timeout, **options)

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        """Turn an error of the server into a `ConnectionError` that names the server."""
        import grpc
        import pymilvus

        try:
            yield
        except (pymilvus.MilvusException, grpc.RpcError, grpc.FutureTimeoutError) as error:
            reason = error.message if isinstance(error, pymilvus.MilvusException) else str(error)
            where = self.address.server
            advice = f"it runs and takes connections, and that {TOKEN} is right if it needs one"
            if Path(where).is_absolute():
                advice = "no other process has this file open, and that this user may write it"
            raise ConnectionError(f"Milvus at {where} failed: {reason}; check that {advice}") from None


def _check_same_means(embeddings: Embeddings, rows: Iterable[Any]) -> None:
    for mean_samples in {row["mean_samples"] for row in rows}:
        check_same_means(embeddings, mean_samples or None)


def _best(k: int, hits: Iterable[_Hit]) -> list[_Hit]:
    return sorted(hits, key=lambda hit: (-hit[1], hit[0]))[:k]


def _blocks(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))

"""A client of `lam serve`. This file needs httpx alone: copy it to machines without torch."""

import json
import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

Json = dict[str, Any]
Kind = TypeVar("Kind")
_IMAGES = {b"\xff\xd8": "image/jpeg", b"\x89PNG": "image/png", b"RIFF": "image/webp"}  # first bytes


class ServiceError(Exception):
    """A failed request: its HTTP `status` (None without an answer), and what the service allows (`allowed`)."""

    def __init__(self, status: int | None, message: str, allowed: Any = None, request_id: str | None = None) -> None:
        what = f"{'no answer' if status is None else status}: {message}"
        super().__init__(what if allowed is None else f"{what}, allowed: {allowed!s:.400}")
        self.status, self.message, self.allowed, self.request_id = status, message, allowed, request_id


@dataclass(frozen=True)
class Embedding:
    """A unit vector and its concentration κ."""

    embedding: Sequence[float]
    kappa: float
    uncertain: bool | None = None


Query = bytes | Path | str | Embedding  # the content of an image file, its path, a text, or an embedding


@dataclass(frozen=True)
class Item:
    """An item of the gallery."""

    id: str
    label: str
    metadata: Json
    kappa: float
    images: int
    resultant: float
    uncertain: bool | None
    thumbnail: str | None
    vector: Sequence[float] | None


@dataclass(frozen=True)
class Hit(Item):
    """An item that a search found. docs/reference/http.md explains the fields."""

    score: float
    accepted: bool | None
    credible: bool
    conformal: bool | None
    interval: Sequence[float] | None


@dataclass(frozen=True)
class Group:
    """The nearest items of a label."""

    label: str
    hits: Sequence[Hit]


@dataclass(frozen=True)
class Answer:
    """The answer to a search; `fields` holds all its fields. With `group_by`, `groups` replaces the hits."""

    decision: str | None
    probability: float | None
    kappa: float
    doubt: str | None
    calibration: str
    gallery_size: int
    hits: Sequence[Hit]
    groups: Sequence[Group] | None
    fields: Json


@dataclass(frozen=True)
class Comparison:
    """The answer to a comparison of two inputs."""

    same: bool | None
    decision: str | None
    probability: float | None
    score: float
    kappa: Sequence[float]


class Client:
    """A client of one run. Threads may share it.

    Args:
        address: address of the service, or of one of its runs, such as `http://127.0.0.1:8000/runs/faces`.
        key: key, if the service has keys; surrounding spaces and line breaks are removed.
        retries: how many times to repeat a request if the service is too busy (503).
        options: options of `httpx.Client`; by default an answer may take 30 seconds.
    """

    def __init__(self, address: str, *, key: str | None = None, retries: int = 3, **options: Any) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {_header_of(key)}"}
        self._http = httpx.Client(base_url=address, headers=headers, **{"timeout": 30.0, **options})
        self._retries = retries

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def search(self, query: Query, *, k: int = 10, filter: Json | None = None, **parameters: Any) -> Answer:
        """Decide whether the gallery holds a match, and find the nearest items.

        Args:
            query: image, text or embedding.
            k: number of hits, or of groups.
            filter: only items that pass it.
            parameters: `min_probability`, `score_threshold`, `with_vector`, `group_by="label"` and `group_size`, as in
                docs/reference/http.md.
        """
        return _answer(self._ask("POST", "/v1/search", query, k=k, filter=filter, **parameters))

    def search_batch(
        self, queries: Sequence[Query], *, k: int = 10, filter: Json | None = None, **parameters: Any
    ) -> list[Answer]:
        """Search for several queries in one request, as `search` does, without groups.

        A refused query raises a `ServiceError`.
        """
        body = {"queries": _parts("queries", queries)}
        answers = self._ask("POST", "/v1/search/batch", body, k=k, filter=filter, **parameters)["answers"]
        for place, found in enumerate(answers):
            if "error" in found:
                raise ServiceError(found["status"], f"query {place}: {found['error']}", found["allowed"])
        return [_answer(found) for found in answers]

    def embed(self, query: Query) -> Embedding:
        """The embedding of an image or a text, and its κ; nothing is stored."""
        return _of(Embedding, self._ask("POST", "/v1/embed", query))

    def verify(self, first: Query, second: Query) -> Comparison:
        """Decide whether two inputs match."""
        return _of(Comparison, self._ask("POST", "/v1/verify", {"first": _part(first), "second": _part(second)}))

    def add(
        self, content: Query, *, id: str | None = None, label: str | None = None, metadata: Json | None = None,
        uncertain: str = "keep", fuse: bool = False,
    ) -> Item:  # fmt: skip
        """Add an item, replace the item with this id, or fuse into this item; by default the content gives the id."""
        if label is not None:
            _check_text("a label", label)
        body = content if metadata is None else {**_part(content), "metadata": metadata}
        method, path = ("POST", "/v1/items") if id is None else ("PUT", _path(id))
        return _of(Item, self._ask(method, path, body, label=label, uncertain=uncertain, fuse=str(fuse).lower()))

    def add_batch(
        self, contents: Sequence[Query], *, ids: Sequence[str] | None = None, labels: Sequence[str] | None = None,
        metadata: Sequence[Json] | None = None, uncertain: str = "keep", fuse: bool = False,
    ) -> list[Item]:  # fmt: skip
        """Add several contents in one request, each as `add` does; if one is refused, none is stored."""
        columns = {"id": ids, "label": labels, "metadata": metadata}
        given = {name: values for name, values in columns.items() if values is not None}
        rows = zip(_parts("contents", contents), *given.values(), strict=True)
        body = {"items": [{**content, **dict(zip(given, facts, strict=True))} for content, *facts in rows]}
        found = self._ask("POST", "/v1/items/batch", body, uncertain=uncertain, fuse=str(fuse).lower())
        return [_of(Item, item) for item in found["items"]]

    def judge(self, answer: Answer, *, label: str | None = None, correct: bool | None = None) -> str:
        """Tell the true label of an answer (empty: no item is right), or whether a match is right.

        The service tests its error rates on such feedback; returns whether they hold: `holds`, `in doubt` or `broken`.
        """
        feedback = {"answer_id": answer.fields["answer_id"], "label": label, "correct": correct}
        known = {name: value for name, value in feedback.items() if value is not None}
        return self._ask("POST", "/v1/feedback", known)["promise"]

    def get(self, id: str, *, with_vector: bool = False) -> Item:
        """Look an item up."""
        return _of(Item, self._ask("GET", _path(id), with_vector=with_vector))

    def items(self, *, filter: Json | None = None, with_vector: bool = False) -> Iterator[Item]:
        """All items that pass a filter, sorted by id."""
        after = ""
        while after is not None:
            page = self._ask("GET", "/v1/items", after=after, limit=1000, filter=filter, with_vector=with_vector)
            yield from (_of(Item, item) for item in page["items"])
            after = page["after"]

    def patch(self, id: str, *, label: str | None = None, metadata: Json | None = None) -> Item:
        """Change label or metadata of an item; metadata with the value None are removed, others stay."""
        changes = {"label": label, "metadata": metadata}
        return _of(Item, self._ask("PATCH", _path(id), {name: to for name, to in changes.items() if to is not None}))

    def delete(self, id: str) -> bool:
        """Erase an item; False if the gallery does not hold it, or if an earlier try that got 503 had deleted it."""
        try:
            return self._ask("DELETE", _path(id))["deleted"]
        except ServiceError as error:
            if error.status != 404:
                raise
        return False

    def delete_items(self, *, filter: Json) -> int:
        """Erase all items that pass a filter, in one step; returns their number, or 0 as for `delete` after a 503."""
        return self._ask("DELETE", "/v1/items", filter=filter)["deleted"]

    def _ask(self, method: str, path: str, body: Query | Json | None = None, **parameters: Any) -> Json:
        content, headers = (None, {}) if method in ("GET", "DELETE") else _encoded(body)
        known = {name: _json(v) if isinstance(v, dict) else v for name, v in parameters.items() if v is not None}
        request = self._http.build_request(method, path, params=known, content=content, headers=headers)
        answer = self._send(request)
        for _ in range(self._retries):
            if answer.status_code != 503:
                break
            after = answer.headers.get("Retry-After", "")
            time.sleep(min(float(after) if after.isdigit() else 1.0, 30.0))
            answer = self._send(request)
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        found = answer.json() if is_json else {"error": answer.text[:200]}  # a proxy may answer otherwise
        if answer.is_success and is_json:
            return found
        raise ServiceError(answer.status_code, str(found.get("error")), found.get("allowed"), found.get("request_id"))

    def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return self._http.send(request)
        except httpx.HTTPError as error:
            raise ServiceError(None, str(error) or type(error).__name__) from error


def _header_of(key: str) -> str:
    """A key without the space around it. The error does not show the key, which is a secret."""
    key = key.strip()
    if not all("!" <= character <= "~" for character in key) or not key:
        raise ValueError("a key must have only ASCII letters, digits and signs, no spaces: it is a header")
    return key


def _of(kind: type[Kind], found: Mapping[str, Any]) -> Kind:
    """A record from the fields of an answer, without fields that a later service may add."""
    return kind(**{field.name: found[field.name] for field in fields(kind)})  # pyright: ignore[reportArgumentType]


def _answer(found: Json) -> Answer:
    groups = found["groups"] and [Group(group["label"], _hits(group)) for group in found["groups"]]
    return _of(Answer, {**found, "hits": _hits(found), "groups": groups, "fields": found})


def _hits(found: Json) -> list[Hit]:
    return [_of(Hit, hit) for hit in found["hits"]]


def _encoded(body: Any) -> tuple[bytes, dict[str, str]]:
    body = body.read_bytes() if isinstance(body, Path) else body
    if isinstance(body, bytes):
        kind = next((kind for start, kind in _IMAGES.items() if body.startswith(start)), "application/octet-stream")
        return body, {"Content-Type": kind}
    return _json(body if isinstance(body, dict) else _part(body)).encode(), {"Content-Type": "application/json"}


def _json(value: Json) -> str:
    """JSON without escapes, which the service's limits count; values of numpy, pandas or torch become Python's."""

    def plain(other: Any) -> Any:
        if hasattr(other, "tolist"):
            return other.tolist()
        raise TypeError(
            f"metadata and filters hold numbers, texts, lists and objects, got {type(other).__name__}: "
            "give str(value), or leave it out"
        )

    text = json.dumps(value, default=plain, ensure_ascii=False)
    return text.encode(errors="replace").decode()  # without lone surrogates


def _parts(name: str, queries: Sequence[Query]) -> list[Json]:
    """Queries of a batch as JSON."""
    if isinstance(queries, str):
        raise TypeError(f"{name} must be a list, got a text: give [text]")
    return [_part(query) for query in queries]


def _part(query: Query) -> Json:
    """A query as JSON."""
    query = query.read_bytes() if isinstance(query, Path) else query
    if isinstance(query, bytes):
        return {"image": b64encode(query).decode()}
    if isinstance(query, str):
        return {"text": query}
    if not isinstance(query, Embedding):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "a query must be the bytes of an image file, its path as pathlib.Path, a text or an Embedding, got "
            f"{type(query).__name__}"
        )
    floats = array("f", map(float, query.embedding))  # elements may be of numpy, torch
    if sys.byteorder == "big":
        floats.byteswap()
    return {"embedding": b64encode(floats.tobytes()).decode(), "kappa": float(query.kappa)}


def _check_text(name: str, value: str) -> None:
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be a text, got {type(value).__name__}: give str(value)")


def _path(id: str) -> str:
    _check_text("an id", id)
    if {".", ".."} & {*id.split("/")}:  # httpx would resolve them, and reach another item
        raise ValueError(f"an id has no part . or .., got {id!r}")
    return f"/v1/items/{quote(id, safe='/')}"

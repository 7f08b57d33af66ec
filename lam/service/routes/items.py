"""The routes that add, look up, list, change and erase items."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from fastapi import FastAPI, Query, Request, Response
from starlette.convertors import PathConvertor, register_url_convertor

from lam.gallery.filters import MAX_FILTER, Filter
from lam.gallery.gallery import Matching
from lam.gallery.item import ID_RULE, MAX_LABEL, Item, ItemInfo, check_id, normalize_label
from lam.gallery.operations import Batch, Change, DeleteWhere, Fuse, Patch, Replace
from lam.gallery.refusal import Refusal
from lam.gallery.store import MAX_PAGE
from lam.service import answers, models, queries, schema
from lam.service.answers import Responder
from lam.service.bodies import ParsedItem, content_type, item_of, items_of, patch_of
from lam.service.embedder import CONTENT_TYPES, embedding_of
from lam.service.engine import Engine
from lam.service.models import JSON
from lam.service.schema import Where, WithVector, json_response, part_answer, part_of, picture, read_json, responses_of
from lam.service.workers import results_of

_PAGE_SIZE = 100
_CHARACTERS = 20  # of one vector component in JSON

Uncertain = Annotated[
    Literal["keep", "refuse"],
    Query(description="whether an item with a κ below the flag is added, as `uncertain`, or refused"),
]
OnError = Annotated[
    Literal["none", "good"],
    Query(description="whether a batch with a bad item is refused, or its good items are stored"),
]
Fusing = Annotated[
    bool,
    Query(
        description="fuse the content into the item of this id, weighted by κ; without fuse, it replaces the item. "
        "Repeated content counts once. Another label is refused"
    ),
]
Label = Annotated[
    str | None,
    Query(
        description=f"its class, at most {MAX_LABEL} characters, stripped of blanks; without one, the old label stays"
    ),
]


class _ItemId(PathConvertor):
    """The id of an item in an address: it may hold slashes, but does not end in `/search` or `/thumbnail`."""

    regex = r"(?!.*/(?:search|thumbnail)$).+"


register_url_convertor("item", _ItemId())


def add_items(app: FastAPI, engine: Engine) -> None:
    """Add the routes of items. Longer addresses come first, because ids may hold slashes and the first route wins."""

    @app.post("/v1/items", status_code=201, responses=schema.ENROLLED, openapi_extra=schema.ITEM)
    async def add_item(
        request: Request,
        id: Annotated[str | None, Query(description=f"{ID_RULE}; without one, the content gives the id")] = None,
        label: Label = None,
        uncertain: Uncertain = "keep",
        fuse: Fusing = False,
    ) -> Response:
        """Add an item. When the response arrives, the item is on disk, and searches find it."""
        return await _enrol(engine, request, id, label, uncertain=uncertain, fuse=fuse)

    @app.post("/v1/items/batch", responses=responses_of(models.EnrolBatchResponse), openapi_extra=schema.ITEM_BATCH)
    async def add_item_batch(
        request: Request, on_error: OnError = "none", uncertain: Uncertain = "keep", fuse: Fusing = False
    ) -> Response:
        """Add several items in order, as `/v1/items` adds each, in one write to disk."""
        parsed = await read_json(engine, request, items_of, engine.writer)
        return await _enrol_batch(engine, parsed, on_error=on_error, uncertain=uncertain, fuse=fuse)

    @app.put("/v1/items/{id:item}", responses=schema.ENROLLED, openapi_extra=schema.ITEM)
    async def put_item(
        request: Request, id: str, label: Label = None, uncertain: Uncertain = "keep", fuse: Fusing = False
    ) -> Response:
        """Add an item under this id, replace it, or fuse an image into it."""
        return await _enrol(engine, request, id, label, uncertain=uncertain, fuse=fuse)

    @app.get("/v1/items", responses=responses_of(models.ListResponse))
    async def list_items(
        after: Annotated[str, Query(max_length=128)] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = _PAGE_SIZE,
        filter: Where = None,
        with_vector: WithVector = False,
    ) -> Response:
        """List items by id, from the first one after `after`. A page of large items may hold fewer than `limit`."""
        engine.admit(engine.lister)
        page = await engine.do(engine.lister, partial(_page, engine, after, limit, filter, with_vector))
        return Response(page, media_type=JSON)

    @app.delete("/v1/items", responses=responses_of(models.DeleteItemsResponse))
    async def delete_items(
        filter: Annotated[str, Query(max_length=MAX_FILTER, description="a filter with a condition, as for a search")],
    ) -> Response:
        """Erase all items that pass a filter, in one step: all of them, or none."""
        engine.admit(engine.lister, engine.writer)
        where, matching = await engine.do(engine.lister, partial(_matching, engine, filter))
        if where.passes_all:
            what = "the filter has no condition: it would delete every item"
            raise Refusal(422, what, allowed="a filter with a condition")
        change = await engine.write(DeleteWhere(where))
        deleted, unknown, size = len(change.removed), list(matching.unknown), len(engine.gallery)
        return json_response(models.DeleteItemsResponse(deleted=deleted, unknown_fields=unknown, gallery_size=size))

    @app.get("/v1/items/{id:path}/search", responses=responses_of(models.SearchResponse))
    async def search_like_item(
        id: str, k: Annotated[int, Query(ge=1, le=engine.settings.max_k)] = 10, filter: Where = None
    ) -> Response:
        """Search by an item's direction and κ, and decide whether another item matches it.

        A run on questions and answers makes no decision: the item is an answer, but calibration queries are questions.
        """
        item, part = await stored(id), await part_of(engine, filter)
        engine.admit(engine.searcher)
        query = queries.Query(embedding_of(torch.from_numpy(item.embedding.copy()), item.kappa))
        return json_response(await engine.do(engine.searcher, queries.Search(query, k, without=id, part=part)))

    @app.get("/v1/items/{id:path}/thumbnail", response_class=Response, responses=schema.THUMBNAIL)
    async def get_thumbnail(request: Request, id: str) -> Response:
        """Look up the small picture of an item."""
        item = await stored(id)
        if item.thumbnail is None:
            raise Refusal(404, "the item has no thumbnail", allowed="items that were added as images")
        return picture(request, item.thumbnail)

    @app.get("/v1/items/{id:item}", responses=responses_of(models.ItemResponse))
    async def get_item(id: str, with_vector: WithVector = False) -> Response:
        """Look an item up."""
        item = await stored(id)
        vector = answers.numbers_of(item.vector) if with_vector else None
        return json_response(models.ItemResponse(**_fields_of(item, engine.responder), vector=vector))

    @app.delete("/v1/items/{id:item}", responses=responses_of(models.DeleteResponse))
    async def delete_item(id: str) -> Response:
        """Erase an item: its vector, its picture, and every trace in the database."""
        engine.admit(engine.writer)
        change = await engine.write(check_id(id))
        if not change.removed:
            raise _no_item()
        return json_response(models.DeleteResponse(id=id, gallery_size=len(engine.gallery)))

    @app.patch("/v1/items/{id:item}", responses=responses_of(models.ItemResponse), openapi_extra=schema.PATCH)
    async def patch_item(request: Request, id: str) -> Response:
        """Change the label or the metadata of an item, and leave all else."""
        label, metadata = await read_json(engine, request, patch_of, engine.writer)
        change = await engine.write(Patch(check_id(id), label, metadata))
        if change.item is None:
            raise _no_item()
        return json_response(models.ItemResponse(**_fields_of(change.item, engine.responder)))

    async def stored(item_id: str) -> Item:
        engine.admit(engine.reader)
        item = await engine.do(engine.reader, partial(engine.gallery.store.get, check_id(item_id)))
        if item is None:
            raise _no_item()
        return item


def _checked(parsed: ParsedItem | Exception, *, fuse: bool) -> ParsedItem:
    """Check and normalize the id and label of an item before it is embedded; `fuse` needs an id."""
    if isinstance(parsed, Exception):
        raise parsed
    label = None if parsed.label is None else normalize_label(parsed.label)
    item_id = None if parsed.id is None else check_id(parsed.id)
    if fuse and item_id is None:
        raise Refusal(422, "fuse needs the id of an item", allowed="id=ID&fuse=true")
    return replace(parsed, id=item_id, label=label)


def _operation(
    parsed: Any, query: queries.Query | BaseException, responder: Responder, *, uncertain: Uncertain, fuse: bool
) -> Item | Replace | Fuse:
    """The operation that adds an item; refused for metadata that are too long, or for a κ that `uncertain` refuses."""
    if isinstance(query, BaseException):
        raise query
    file = parsed.content if isinstance(parsed.content, bytes) else None
    item = query.to_item(parsed.id, label=parsed.label or "", metadata=parsed.metadata or "{}", file=file)
    if uncertain == "refuse":
        _refuse_uncertain(responder, query)
    keeps = [name for name in ("label", "metadata") if getattr(parsed, name) is None]
    return Fuse(item) if fuse else Replace(item, keeps) if keeps else item


async def _enrol(
    engine: Engine, request: Request, item_id: str | None, label: str | None, *, uncertain: Uncertain, fuse: bool
) -> Response:
    if content_type(request.headers, *CONTENT_TYPES, JSON) != JSON:
        parsed = ParsedItem(await request.body())
    else:
        parsed = await read_json(engine, request, item_of, engine.writer)
        item_id, label = _same("id", item_id, parsed.id), _same("label", label, parsed.label)
    parsed = _checked(replace(parsed, id=item_id, label=label), fuse=fuse)
    if not isinstance(parsed.content, queries.Query):
        engine.admit(engine.decoder, engine.network, engine.writer)
    query = await engine.embed(parsed.content, with_thumbnail=True)
    change = await engine.write(_operation(parsed, query, engine.responder, uncertain=uncertain, fuse=fuse))
    return json_response(_enrolled(engine, query, change), 201 if change.created else 200)


async def _enrol_batch(
    engine: Engine, parsed: Sequence[ParsedItem | Exception], *, on_error: OnError, uncertain: Uncertain, fuse: bool
) -> Response:
    """Add or fuse the items of a batch; `on_error` says whether a bad item prevents the others."""
    entries = results_of(partial(_checked, part, fuse=fuse) for part in parsed)
    contents = [entry.content if isinstance(entry, ParsedItem) else entry for entry in entries]
    embedded = await engine.embed_all(contents, with_thumbnail=True)
    made = results_of(
        partial(_operation, entry, query, engine.responder, uncertain=uncertain, fuse=fuse)
        for entry, query in zip(entries, embedded, strict=True)
    )
    if on_error == "none":
        _refuse_bad(made)
    good = [one for one in made if not isinstance(one, Exception)]
    change = await engine.write(Batch(good, whole=on_error == "none"))
    if on_error == "none":
        _refuse_bad(change.parts)
    effects = iter(change.parts)
    results = [one if isinstance(one, Exception) else next(effects) for one in made]
    items = [
        _enrolled(engine, cast(queries.Query, query), result) if isinstance(result, Change) else part_answer(result)
        for result, query in zip(results, embedded, strict=True)
    ]
    stored = sum(isinstance(result, Change) for result in results)
    batch = models.EnrolBatchResponse(items=items, stored=stored, gallery_size=len(engine.gallery))
    return Response(await engine.do(engine.reader, batch.to_json), media_type=JSON)


def _refuse_bad(parts: Sequence[object]) -> None:
    """Refuse a batch with bad items; the error lists their positions and explains the first."""
    bad = {place: part for place, part in enumerate(parts) if isinstance(part, BaseException)}
    if not bad:
        return
    place, first = next(iter(bad.items()))
    if not isinstance(first, Refusal):
        raise first
    places = ", ".join(map(str, bad))
    what = f"nothing was stored: items {places} of {len(parts)}, counted from 0, are bad. Item {place}: {first.error}"
    allowed = {f"item {place}": first.allowed, "or": "on_error=good"}
    raise Refusal(first.status, what, allowed=allowed, headers=first.headers)


def _enrolled(engine: Engine, query: queries.Query, change: Change) -> models.EnrolResponse:
    assert change.item is not None
    return models.EnrolResponse(
        **_fields_of(change.item, engine.responder),
        created=change.created,
        kappa_capped=query.capped,
        text_cut=query.text_cut,
        calibration=engine.responder.state(len(engine.gallery)),
        gallery_size=len(engine.gallery),
    )


def _page(engine: Engine, after: str, limit: int, filter: str | None, with_vector: bool) -> bytes:
    """A page of items as JSON, and the id after which the next page begins."""
    where, matching = (None, None) if filter is None else _matching(engine, filter)
    if with_vector:
        limit = min(limit, max(1, MAX_PAGE // (_CHARACTERS * engine.gallery.dimension)))
    store = engine.gallery.store
    infos = store.page(after=after, limit=limit, where=where)
    vectors = store.vectors_of(infos) if with_vector else {}  # except items deleted meanwhile
    items = [
        models.ItemResponse(**_fields_of(info, engine.responder), vector=answers.numbers_of(vectors.get(key)))
        for key, info in infos.items()
    ]
    after_last = items[-1].id if items and store.page(after=items[-1].id, limit=1, where=where) else None
    total, unknown = (len(engine.gallery), ()) if matching is None else (len(matching), matching.unknown)
    return models.ListResponse(items=items, after=after_last, total=total, unknown_fields=list(unknown)).to_json()


def _matching(engine: Engine, filter: str) -> tuple[Filter, Matching]:
    where = Filter.parse(filter)
    return where, engine.gallery.matching(where)


def _fields_of(info: Item | ItemInfo, responder: Responder) -> dict[str, Any]:
    return {**responder.about(info), "kappa": info.kappa, "sha256": info.sha256.hex()}


def _refuse_uncertain(responder: Responder, query: queries.Query) -> None:
    what, kappa = "image" if query.text is None else "text", query.kappa
    if responder.calibration is None:
        error = f"the run is not calibrated: nothing says which {what}s are uncertain"
        raise Refusal(409, error, allowed="uncertain=keep")
    if responder.is_uncertain(kappa):
        least = responder.calibration.kappa_below
        error = f"the {what} is uncertain: its κ of {kappa:.6g} is below the flag at {least:.6g}; nothing was stored"
        raise Refusal(422, error, allowed={"kappa_at_least": least, "or": "uncertain=keep"})


def _same(name: str, in_address: str | None, in_body: str | None) -> str | None:
    """A field from the address, the body, or both if they agree."""
    if None not in (in_address, in_body) and in_address != in_body:
        what = f"the {name} in the address differs from the one in the body"
        raise Refusal(422, what, allowed="one of them, or equal ones")
    return in_address if in_body is None else in_body


def _no_item() -> Refusal:
    return Refusal(404, "there is no item of this id", allowed="the ids of GET /v1/items")

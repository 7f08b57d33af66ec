"""The routes. They raise a `ServiceError` for a refused request; `lam.service.limits` checks every request first."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi import Path as PathParameter
from starlette.convertors import Convertor, register_url_convertor
from starlette.staticfiles import StaticFiles

from lam import __version__
from lam.gallery.filters import MAX_FILTER, Filter
from lam.gallery.gallery import Matching
from lam.gallery.item import ID_RULE, MAX_LABEL, Item, check_id, normalize_label
from lam.gallery.refusal import busy
from lam.gallery.store import DeleteWhere, Fuse, ItemInfo, Operation, Patch, Replace
from lam.inputs.thumbnails import media_type
from lam.service import answers, models
from lam.service.answers import Responder
from lam.service.bodies import ParsedItem, content_type, embedding_query_of, item_of, pair_of, patch_of, query_of
from lam.service.engine import Engine, embedding_of
from lam.service.errors import ServiceError
from lam.service.images import CONTENT_TYPES
from lam.service.limits import GUARDED, OPEN_PATHS, Limits
from lam.service.metrics import Metrics
from lam.service.models import JSON, responses_of
from lam.service.refusals import answer_errors, refuse_unknown_parameters

PAGE = Path(__file__).parent / "page"
_PAGE_SIZE = 100
_VERSIONS = ("torch", "pillow", "fastapi", "uvicorn", "uvloop")

Uncertain = Annotated[
    Literal["keep", "refuse"],
    Query(description="an item with a κ below the flag is added and reported as `uncertain`, or refused"),
]
Fusing = Annotated[
    bool,
    Query(
        description="fuse it into the item of this id, weighted by κ. The same content twice counts once, another "
        "label is refused. Without fuse it replaces the item"
    ),
]
Label = Annotated[
    str | None,
    Query(description=f"its class, in at most {MAX_LABEL} characters; without one, an item keeps its own"),
]


Where = Annotated[
    str | None,
    Query(
        max_length=MAX_FILTER,
        description="only items that pass this filter: JSON with must, should and must_not, as docs/reference/http.md "
        'says, such as `{"must": [{"key": "city", "match": {"value": "Rome"}}]}`',
    ),
]


class _ItemId(Convertor[str]):
    """The id of an item in an address: it may hold slashes, but ends in no address under an item."""

    regex = r"(?!.*/(?:search|thumbnail)$).+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("item", _ItemId())


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The schema, with bodies that routes read themselves, and with the key of `Limits`."""
        if self.openapi_schema is None:
            schema = super().openapi()
            schema["components"]["schemas"] |= models.request_schemas()
            schema["components"]["securitySchemes"] = models.SECURITY
            for path, operations in schema["paths"].items():
                is_guarded = path.startswith(GUARDED) and path not in OPEN_PATHS
                for operation in operations.values():
                    operation["security"] = [{}, *({name: []} for name in models.SECURITY)] if is_guarded else []
        return super().openapi()


def create_app(engine: Engine, *, key: str | None = None) -> Limits:
    """The application of an engine; it closes the engine when the server shuts down.

    Args:
        engine: an opened run.
        key: see `lam.service.limits.Limits`.
    """
    metrics = Metrics(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.openapi()  # slow; cached here for later
        yield
        await asyncio.to_thread(engine.close)

    app = _App(
        title="lam",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        responses=models.REFUSALS,
        dependencies=[Depends(refuse_unknown_parameters)],
    )
    answer_errors(app, pages=frozenset({"/", *(f"/{file.name}" for file in PAGE.iterdir())}))
    _add_searches(app, engine, metrics)
    _add_items(app, engine)
    _add_state(app, engine, metrics)
    app.router.default = StaticFiles(directory=PAGE, html=True)  # a mount would hide the methods of routes
    return Limits(app, engine.settings, key=key, max_json=_max_json(engine), count=metrics.count_request)


def _max_json(engine: Engine) -> int:
    return engine.settings.max_json + 32 * engine.gallery.dimension  # 32 characters for each number


def _json(answer: models.Answer, status: int = 200) -> Response:
    return Response(answer.to_json(), status, media_type=JSON)


def _add_searches(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    dimension = engine.gallery.dimension

    @app.post("/v1/search", responses=responses_of(models.SearchResponse), openapi_extra=models.QUERY)
    async def search(
        request: Request,
        k: Annotated[int, Query(ge=1, le=engine.settings.max_k)] = 10,
        min_probability: Annotated[float, Query(ge=0, le=1)] = 0.0,
        filter: Where = None,
    ) -> Response:
        """Decide whether an image or a text is in the gallery, and return the nearest items."""
        if filter is not None and min_probability > 0:
            what = "a filtered search has no probability: it was learnt for the whole gallery"
            raise ServiceError(422, what, allowed="filter without min_probability")
        part = await _part(engine, filter)
        kind, body = content_type(request.headers, *CONTENT_TYPES, JSON), await request.body()
        if kind == JSON and not engine.takes_texts:
            engine.admit(engine.searcher)
            query: answers.Query | Callable[[], answers.Query] = partial(embedding_query_of, body, dimension)
        else:
            query = await embedded(body, kind)
        answer = await engine.search(answers.Search(query, k, min_probability, part=part))
        metrics.count_decision(answer.decision, answer.kappa)
        return _json(answer)

    async def embedded(body: bytes, kind: str) -> answers.Query:
        content: answers.Query | bytes | str = body
        if kind == JSON:
            engine.admit(engine.reader, engine.searcher)
            content = await engine.read(partial(query_of, body, dimension))
        if not isinstance(content, answers.Query):
            engine.admit(engine.decoder, engine.network, engine.searcher)
        return await engine.embed(content)

    @app.post("/v1/embed", responses=responses_of(models.EmbedResponse), openapi_extra=models.QUERY)
    async def embed(request: Request) -> Response:
        """Embed an image or a text, and store nothing."""
        query = await embedded(await request.body(), content_type(request.headers, *CONTENT_TYPES, JSON))
        return _json(
            models.EmbedResponse(
                embedding=torch.nn.functional.normalize(query.embedding.mean[0].double(), dim=0).tolist(),
                kappa=query.kappa,
                kappa_capped=query.capped,
                uncertain=engine.responder.is_uncertain(query.kappa),
                text_cut=query.text_cut,
            )
        )

    @app.post("/v1/verify", responses=responses_of(models.VerifyResponse), openapi_extra=models.PAIR)
    async def verify(request: Request) -> Response:
        """Decide whether two images in base64, texts or embeddings match."""
        content_type(request.headers, JSON)
        engine.admit(engine.reader, engine.decoder, engine.network)
        pair = await engine.read(partial(pair_of, await request.body(), dimension, _max_json(engine)))
        first, second = [await engine.embed(part) for part in pair]
        answer = await engine.read(partial(engine.responder.verify, first, second))
        metrics.count_pair(answer.decision)
        return _json(answer)


def _add_items(app: FastAPI, engine: Engine) -> None:  # addresses under an item come first: ids may hold slashes
    @app.post("/v1/items", status_code=201, responses=models.ENROLLED, openapi_extra=models.ITEM)
    async def add_item(
        request: Request,
        id: Annotated[str | None, Query(description=f"{ID_RULE}; without one, the content is the id")] = None,
        label: Label = None,
        uncertain: Uncertain = "keep",
        fuse: Fusing = False,
    ) -> Response:
        """Add an item; once answered, it is on disk and searches find it. Without an id, its content is its id."""
        return await _enrol(engine, request, id, label, uncertain=uncertain, fuse=fuse)

    @app.put("/v1/items/{id:item}", responses=models.ENROLLED, openapi_extra=models.ITEM)
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
    ) -> Response:
        """List items by rising id, starting after an id; fewer than the limit, if they are large."""
        engine.admit(engine.lister)
        return Response(await engine.list_items(partial(_page, engine, after, limit, filter)), media_type=JSON)

    @app.delete("/v1/items", responses=responses_of(models.DeleteItemsResponse))
    async def delete_items(
        filter: Annotated[str, Query(max_length=MAX_FILTER, description="a filter with a condition, as for a search")],
    ) -> Response:
        """Erase all items that pass a filter, in one step: all of them, or none."""
        engine.admit(engine.lister, engine.writer)
        where, matching = await engine.list_items(partial(_matching, engine, filter))
        if where.passes_all:
            what = "the filter has no condition: it would delete every item"
            raise ServiceError(422, what, allowed="a filter with a condition")
        change = await engine.write(DeleteWhere(where))
        deleted, unknown = len(change.removed), list(matching.unknown)
        return _json(
            models.DeleteItemsResponse(deleted=deleted, unknown_fields=unknown, gallery_size=len(engine.gallery))
        )

    @app.get("/v1/items/{id:path}/search", responses=responses_of(models.SearchResponse))
    async def search_like_item(
        id: str, k: Annotated[int, Query(ge=1, le=engine.settings.max_k)] = 10, filter: Where = None
    ) -> Response:
        """Search by an item's direction and κ, without the item itself: decide whether another item matches.

        There is no decision for an answer to questions: it is unlike the calibration queries.
        """
        item, part = await stored(id), await _part(engine, filter)
        engine.admit(engine.searcher)
        query = answers.Query(embedding_of(torch.from_numpy(item.embedding.copy()), item.kappa))
        return _json(await engine.search(answers.Search(query, k, without=id, part=part)))

    @app.get("/v1/items/{id:path}/thumbnail", response_class=Response, responses=models.THUMBNAIL)
    async def get_thumbnail(request: Request, id: str) -> Response:
        """Look up the small picture of an item."""
        item = await stored(id)
        if item.thumbnail is None:
            raise ServiceError(404, "the item has no thumbnail", allowed="items that were added as images")
        return _picture(request, item.thumbnail)

    @app.get("/v1/items/{id:item}", responses=responses_of(models.ItemResponse))
    async def get_item(id: str) -> Response:
        """Look an item up."""
        return _json(models.ItemResponse(**_fields_of(ItemInfo.of(await stored(id)), engine.responder)))

    @app.delete("/v1/items/{id:item}", responses=responses_of(models.DeleteResponse))
    async def delete_item(id: str) -> Response:
        """Erase an item: its vector, its picture, and every trace in the database."""
        engine.admit(engine.writer)
        change = await engine.write(check_id(id))
        if not change.removed:
            raise _no_item()
        return _json(models.DeleteResponse(id=id, gallery_size=len(engine.gallery)))

    @app.patch("/v1/items/{id:item}", responses=responses_of(models.ItemResponse), openapi_extra=models.PATCH)
    async def patch_item(request: Request, id: str) -> Response:
        """Change the label or the metadata of an item, and leave all else."""
        content_type(request.headers, JSON)
        engine.admit(engine.reader, engine.writer)
        label, metadata = await engine.read(partial(patch_of, await request.body()))
        change = await engine.write(Patch(check_id(id), label, metadata))
        if change.item is None:
            raise _no_item()
        return _json(models.ItemResponse(**_fields_of(ItemInfo.of(change.item), engine.responder)))

    async def stored(item_id: str) -> Item:
        engine.admit(engine.reader)
        item = await engine.read(partial(engine.gallery.get, check_id(item_id)))
        if item is None:
            raise _no_item()
        return item


async def _part(engine: Engine, filter: str | None) -> answers.Part | None:
    """The part of the gallery that a filter leaves; None without a filter."""
    if filter is None:
        return None
    engine.admit(engine.filterer)
    return await engine.part(filter)


def _matching(engine: Engine, filter: str) -> tuple[Filter, Matching]:
    where = Filter.parse(filter)
    return where, engine.gallery.matching(where)


def _picture(request: Request, image: bytes) -> Response:
    """An image, or 304 if the client already has it."""
    tag = f'"{hashlib.sha256(image).hexdigest()[:32]}"'
    known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
    if known & {tag, "*"}:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(image, media_type=media_type(image), headers={"ETag": tag})


def _no_item() -> ServiceError:
    return ServiceError(404, "there is no item of this id", allowed="the ids of GET /v1/items")


async def _enrol(
    engine: Engine, request: Request, item_id: str | None, label: str | None, *, uncertain: Uncertain, fuse: bool
) -> Response:
    """Put or fuse the item of a request."""
    kind = content_type(request.headers, *CONTENT_TYPES, JSON)
    body = await request.body()
    parsed = ParsedItem(body)
    if kind == JSON:
        engine.admit(engine.reader, engine.writer)
        parsed = await engine.read(partial(item_of, body, engine.gallery.dimension))
        item_id, label = _same("id", item_id, parsed.id), _same("label", label, parsed.label)
    fields = {"label": label, "metadata": parsed.metadata}
    keeps = [name for name, value in fields.items() if value is None]
    label, item_id = normalize_label(label or ""), None if item_id is None else check_id(item_id)
    if fuse and item_id is None:
        raise ServiceError(422, "fuse needs the id of the item that the image is of", allowed="id=ID&fuse=true")
    if not isinstance(parsed.content, answers.Query):
        engine.admit(engine.decoder, engine.network, engine.writer)
    query = await engine.embed(parsed.content, with_thumbnail=True)
    file = parsed.content if isinstance(parsed.content, bytes) else None
    item = query.to_item(item_id, label=label, metadata=parsed.metadata or "{}", file=file)
    if uncertain == "refuse":
        _refuse_uncertain(engine.responder, query)
    operation: Operation = Fuse(item) if fuse else Replace(item, keeps) if keeps else item
    change = await engine.write(operation)
    answer = models.EnrolResponse(
        **_fields_of(ItemInfo.of(change.item or item), engine.responder),
        created=change.created,
        kappa_capped=query.capped,
        text_cut=query.text_cut,
        calibration=engine.responder.state(len(engine.gallery)),
        gallery_size=len(engine.gallery),
    )
    return _json(answer, 201 if change.created else 200)


def _add_state(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.head("/v1/health", include_in_schema=False)
    @app.get("/v1/health")
    async def get_health() -> models.HealthResponse:
        """The process answers."""
        return models.HealthResponse()

    @app.head("/v1/ready", include_in_schema=False)
    @app.get("/v1/ready")
    async def get_ready() -> models.ReadyResponse:
        """Whether requests can be served now."""
        if complaints := engine.complaints:
            raise busy("; ".join(complaints))
        return models.ReadyResponse(gallery_size=len(engine.gallery))

    @app.get("/v1/model")
    async def get_model() -> models.ModelResponse:
        """The run that answers: hashes, calibration, limits and versions."""
        import faiss

        encoder, settings, recall = engine.encoder, engine.settings, engine.gallery.recall
        return models.ModelResponse(
            run=engine.run.folder.name,
            kind=encoder.kind,
            gallery=engine.run.gallery_kind,
            answers=engine.run.has_answers,
            sha256=engine.run.fingerprint,
            dimension=encoder.dimension,
            device=engine.device,
            preprocessing=None if encoder.preprocessing is None else encoder.preprocessing.to_json(),
            calibration=engine.responder.state(len(engine.gallery)),
            threshold=engine.responder.thresholds,
            gallery_size=len(engine.gallery),
            index=engine.gallery.index.factory,
            index_recall=None
            if recall is None
            else models.RecallFields(
                queries=recall.n_queries,
                k=recall.k,
                recall=recall.share,
                hits=recall.depth,
                unchanged=recall.unchanged,
            ),
            limits=models.LimitFields(
                max_bytes=settings.max_body,
                max_json_bytes=_max_json(engine),
                max_pixels=settings.max_pixels,
                max_side=settings.max_side,
                max_decoded_bytes=settings.max_decoded,
                max_k=settings.max_k,
            ),
            # FAISS is installed by one of several packages
            versions={"lam": __version__, "faiss": faiss.__version__, **{name: version(name) for name in _VERSIONS}},
        )

    @app.get("/v1/calibration")
    async def get_calibration() -> models.CalibrationResponse:
        """The promised rates of thresholds, and the κ of the calibration."""
        if engine.responder.summary is None:
            allowed = "`lam calibrate RUN`, then a SIGHUP or a restart"
            raise ServiceError(404, "the run is not calibrated", allowed=allowed)
        return engine.responder.summary

    @app.get("/v1/samples")
    async def list_samples() -> models.SamplesResponse:
        """List a few inputs to try the run with: some of its classes, and a stranger."""
        samples = [
            models.SampleFields(
                source=sample.source,
                stranger=sample.stranger,
                text=sample.text,
                image=None if sample.image is None else f"/v1/samples/{number}",
            )
            for number, sample in enumerate(engine.samples)
        ]
        return models.SamplesResponse(samples=samples)

    @app.get("/v1/samples/{number}", response_class=Response, responses=models.SAMPLE)
    async def get_sample(
        request: Request, number: Annotated[int, PathParameter(ge=0, description="from 0 on")]
    ) -> Response:
        """Look up the file of a sample image, to send it as a query."""
        image = engine.samples[number].image if number < len(engine.samples) else None
        if image is None:
            raise ServiceError(404, "there is no image of this number", allowed="the images of GET /v1/samples")
        return _picture(request, image)

    @app.get("/metrics", response_class=Response, responses=models.METRICS)
    async def get_metrics() -> Response:
        """Report metrics in the format of Prometheus."""
        return Response(await asyncio.to_thread(metrics.text), media_type="text/plain; version=0.0.4; charset=utf-8")


def _page(engine: Engine, after: str, limit: int, filter: str | None) -> bytes:
    """A page of items as JSON, and the id after which the next page begins."""
    where, matching = (None, None) if filter is None else _matching(engine, filter)
    infos = engine.gallery.page(after=after, limit=limit, where=where)
    is_more = bool(infos) and bool(engine.gallery.page(after=infos[-1].id, limit=1, where=where))
    items = [models.ItemResponse(**_fields_of(info, engine.responder)) for info in infos]
    after_last = infos[-1].id if is_more else None
    total, unknown = (len(engine.gallery), ()) if matching is None else (len(matching), matching.unknown)
    return models.ListResponse(items=items, after=after_last, total=total, unknown_fields=list(unknown)).to_json()


def _fields_of(info: ItemInfo, responder: Responder) -> dict[str, Any]:
    return {**responder.about(info), "kappa": info.kappa, "sha256": info.sha256.hex()}


def _refuse_uncertain(responder: Responder, query: answers.Query) -> None:
    what, kappa = "image" if query.text is None else "text", query.kappa
    if responder.calibration is None:
        raise ServiceError(
            409, f"the run is not calibrated: nothing says which {what}s are uncertain", allowed="uncertain=keep"
        )
    if responder.is_uncertain(kappa):
        least = responder.calibration.kappa_below
        raise ServiceError(
            422,
            f"the {what} is uncertain: its κ of {kappa:.6g} is below the flag at {least:.6g}; nothing was stored",
            allowed={"kappa_at_least": least, "or": "uncertain=keep"},
        )


def _same(name: str, in_address: str | None, in_body: str | None) -> str | None:
    """A field from the address, the body, or both if they agree."""
    if None not in (in_address, in_body) and in_address != in_body:
        raise ServiceError(
            422, f"the {name} in the address is not the one in the body", allowed="one of them, or equal"
        )
    return in_address if in_body is None else in_body

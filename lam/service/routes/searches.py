"""The routes that search, embed and compare."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import torch
from fastapi import FastAPI, Query, Request, Response

from lam.gallery.embed import takes_texts
from lam.gallery.refusal import Refusal
from lam.service import models, queries, schema
from lam.service.bodies import content_type, embedding_query_of, pair_of, queries_of, query_of
from lam.service.embedder import CONTENT_TYPES
from lam.service.engine import Engine
from lam.service.metrics import Metrics
from lam.service.models import JSON
from lam.service.schema import responses_of

_GROUP_SIZE = 3  # Qdrant's default
Share = Annotated[float, Query(ge=0, le=1)]
Threshold = Annotated[float, Query(ge=-1, le=1, description="hits of a lower cosine are left out")]


def add_searches(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    """Add the routes of searches, of embeddings and of pairs."""

    limits, takes_images = engine.json_limits, not takes_texts(engine.embedder.encoder)

    @app.post("/v1/search", responses=responses_of(models.SearchResponse), openapi_extra=schema.QUERY)
    async def search(
        request: Request,
        k: Annotated[int, Query(ge=1, le=engine.settings.max_k)] = 10,
        min_probability: Share = 0.0,
        filter: schema.Where = None,
        score_threshold: Threshold = -1.0,
        with_vector: schema.WithVector = False,
        group_by: Annotated[
            Literal["label"] | None, Query(description="return the nearest items of each of `k` labels, as `groups`")
        ] = None,
        group_size: Annotated[
            int | None, Query(ge=1, le=engine.settings.max_k, description=f"items of a group; {_GROUP_SIZE} if missing")
        ] = None,
    ) -> Response:
        """Decide whether an image or a text is in the gallery, and return the nearest items."""
        size = _group_size(engine, k, group_by, group_size)
        part = await part_searched(filter, min_probability)
        kind, body = content_type(request.headers, *CONTENT_TYPES, JSON), await request.body()
        if kind == JSON and takes_images and len(body) <= limits.max_json and b'"embedding"' in body:
            engine.admit(engine.searcher)
            query: queries.Query | Callable[[], queries.Query] = partial(embedding_query_of, body, limits)
        else:
            query = await embedded(body, kind)
        search = queries.Search(
            query, k, min_probability, part=part, score_threshold=score_threshold, with_vector=with_vector
        )
        if group_by is None:
            answer = await engine.do(engine.searcher, search)
        else:
            engine.admit(engine.lister)
            first = replace(search, k=1, score_threshold=-1.0, with_vector=False)
            found = await engine.do(engine.searcher, first)
            answer = await engine.do(engine.lister, partial(engine.searches.grouped, search, found, size))
        metrics.count_decision(answer.decision, answer.kappa)
        return schema.json_response(answer)

    @app.post("/v1/search/batch", responses=responses_of(models.SearchBatchResponse), openapi_extra=schema.QUERY_BATCH)
    async def search_batch(
        request: Request,
        k: Annotated[int, Query(ge=1, le=engine.settings.max_k)] = 10,
        min_probability: Share = 0.0,
        filter: schema.Where = None,
        score_threshold: Threshold = -1.0,
        with_vector: schema.WithVector = False,
    ) -> Response:
        """Answer several queries as `/v1/search` answers each; a refused query does not stop the others."""
        part = await part_searched(filter, min_probability)
        contents = await schema.read_json(engine, request, queries_of, engine.searcher)
        if len(contents) * k > (most := engine.settings.batch * engine.settings.max_k):
            what = f"{len(contents)} queries of {k} hits are more than {most} hits"
            raise Refusal(422, what, allowed={"k": most // len(contents)})
        read = await engine.embed_all(contents)
        options = {"part": part, "score_threshold": score_threshold, "with_vector": with_vector}
        search = partial(queries.Search, k=k, min_probability=min_probability, **options)
        searches = [search(query) for query in read if isinstance(query, queries.Query)]
        found = iter(await engine.search_all(searches))
        results = [next(found) if isinstance(query, queries.Query) else query for query in read]
        for answer in results:
            if isinstance(answer, models.SearchResponse):
                metrics.count_decision(answer.decision, answer.kappa)
        batch = models.SearchBatchResponse(answers=[schema.part_answer(result) for result in results])
        return Response(await engine.do(engine.reader, batch.to_json), media_type=JSON)

    async def part_searched(filter: str | None, min_probability: float) -> queries.Part | None:
        if filter is not None and min_probability > 0:
            what = "a filtered search has no probability: it was learned for the whole gallery"
            raise Refusal(422, what, allowed="filter without min_probability")
        return await schema.part_of(engine, filter)

    async def embedded(body: bytes, kind: str) -> queries.Query:
        content: queries.Query | bytes | str = body
        if kind == JSON:
            engine.admit(engine.reader, engine.searcher)
            content = await engine.do(engine.reader, partial(query_of, body, limits))
        if not isinstance(content, queries.Query):
            engine.admit(engine.decoder, engine.network, engine.searcher)
        return await engine.embed(content)

    @app.post("/v1/embed", responses=responses_of(models.EmbedResponse), openapi_extra=schema.QUERY)
    async def embed(request: Request) -> Response:
        """Embed an image or a text, and store nothing."""
        query = await embedded(await request.body(), content_type(request.headers, *CONTENT_TYPES, JSON))
        return schema.json_response(
            models.EmbedResponse(
                embedding=torch.nn.functional.normalize(query.embedding.mean[0].double(), dim=0).tolist(),
                kappa=query.kappa,
                kappa_capped=query.capped,
                uncertain=engine.responder.is_uncertain(query.kappa),
                text_cut=query.text_cut,
            )
        )

    @app.post("/v1/verify", responses=responses_of(models.VerifyResponse), openapi_extra=schema.PAIR)
    async def verify(request: Request) -> Response:
        """Decide whether two images, texts or embeddings match."""
        pair = await schema.read_json(engine, request, pair_of, engine.decoder, engine.network)
        first, second = [await engine.embed(part) for part in pair]
        answer = await engine.do(engine.reader, partial(engine.responder.verify, first, second))
        metrics.count_pair(answer.decision)
        return schema.json_response(answer)


def _group_size(engine: Engine, k: int, group_by: str | None, group_size: int | None) -> int:
    if group_by is None and group_size is not None:
        raise Refusal(422, "group_size needs group_by", allowed="group_by=label")
    size, most = group_size or _GROUP_SIZE, engine.settings.max_k
    if group_by is not None and k * size > most:
        raise Refusal(422, f"{k} groups of {size} items are more than {most} items", allowed={"k * group_size": most})
    return size

"""The routes that search, embed and compare."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from fastapi import FastAPI, Query, Request, Response

from lam.service import answers, models
from lam.service.bodies import content_type, embedding_query_of, pair_of, query_of
from lam.service.engine import Engine
from lam.service.errors import ServiceError
from lam.service.images import CONTENT_TYPES
from lam.service.metrics import Metrics
from lam.service.models import JSON, responses_of
from lam.service.routes.parameters import Where, json_response, max_json_of, part_of


def add_searches(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    """Add the routes of searches, of embeddings and of pairs."""

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
        part = await part_of(engine, filter)
        kind, body = content_type(request.headers, *CONTENT_TYPES, JSON), await request.body()
        if kind == JSON and not engine.takes_texts:
            engine.admit(engine.searcher)
            query: answers.Query | Callable[[], answers.Query] = partial(embedding_query_of, body, dimension)
        else:
            query = await embedded(body, kind)
        answer = await engine.search(answers.Search(query, k, min_probability, part=part))
        metrics.count_decision(answer.decision, answer.kappa)
        return json_response(answer)

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
        return json_response(
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
        pair = await engine.read(partial(pair_of, await request.body(), dimension, max_json_of(engine)))
        first, second = [await engine.embed(part) for part in pair]
        answer = await engine.read(partial(engine.responder.verify, first, second))
        metrics.count_pair(answer.decision)
        return json_response(answer)

"""The route of feedback on answers."""

from functools import partial

from fastapi import FastAPI, Request, Response

from lam.service import models, schema
from lam.service.bodies import content_type, feedback_of
from lam.service.engine import Engine
from lam.service.models import JSON
from lam.service.routes.parameters import json_limits_of, json_response
from lam.service.schema import responses_of


def add_feedback(app: FastAPI, engine: Engine) -> None:
    """Add the route of feedback."""

    @app.post("/v1/feedback", responses=responses_of(models.FeedbackResponse), openapi_extra=schema.FEEDBACK)
    async def give_feedback(request: Request) -> Response:
        """Tell what an answer should have been, so that the promises are tested."""
        content_type(request.headers, JSON)
        engine.admit(engine.reader, engine.watcher)
        feedback = await engine.read(partial(feedback_of, await request.body(), json_limits_of(engine)))
        return json_response(await engine.judge(feedback))

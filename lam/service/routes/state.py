"""The routes of the service itself: its state, samples and metrics, feedback, backups and reloads."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated

from fastapi import FastAPI, Request, Response
from fastapi import Path as PathParameter

from lam import __version__
from lam.gallery.refusal import busy
from lam.service import models, schema, state_models
from lam.service.bodies import feedback_of
from lam.service.engine import Engine
from lam.service.errors import ServiceError
from lam.service.metrics import Metrics
from lam.service.routes.parameters import json_limits_of, json_response, picture, read_json
from lam.service.schema import responses_of
from lam.service.watch import Watch

_VERSIONS = ("torch", "pillow", "fastapi", "uvicorn", "uvloop")


def add_state(app: FastAPI, engine: Engine, metrics: Metrics, reload: Callable[[], Awaitable[Engine]]) -> None:
    """Add the routes of the service itself; `reload` returns the engine that then answers."""

    @app.head("/v1/health", include_in_schema=False)
    @app.get("/v1/health")
    async def get_health() -> state_models.HealthResponse:
        """The process answers."""
        return state_models.HealthResponse()

    @app.head("/v1/ready", include_in_schema=False)
    @app.get("/v1/ready")
    async def get_ready() -> state_models.ReadyResponse:
        """Whether requests can be served now."""
        if complaints := engine.complaints:
            raise busy("; ".join(complaints))
        return state_models.ReadyResponse(gallery_size=len(engine.gallery))

    @app.get("/v1/model")
    async def get_model() -> state_models.ModelResponse:
        """The run that answers: hashes, calibration, limits and versions."""
        import faiss

        encoder, settings, recall = engine.embedder.encoder, engine.settings, engine.gallery.recall
        return state_models.ModelResponse(
            run=engine.run.folder.name,
            kind=encoder.kind,
            gallery=engine.run.gallery_kind,
            answers=engine.run.has_answers,
            sha256=engine.run.fingerprint,
            dimension=encoder.dimension,
            device=engine.embedder.device,
            preprocessing=None if encoder.preprocessing is None else encoder.preprocessing.to_json(),
            calibration=engine.responder.state(len(engine.gallery)),
            promise=_promise(engine.watch),
            threshold=engine.responder.thresholds,
            gallery_size=len(engine.gallery),
            index=engine.gallery.index.factory,
            index_recall=None
            if recall is None
            else state_models.RecallFields(
                queries=recall.n_queries, k=recall.k, recall=recall.share, hits=recall.depth, unchanged=recall.unchanged
            ),
            limits=state_models.LimitFields(
                max_bytes=settings.max_body,
                max_json_bytes=json_limits_of(engine).max_json,
                max_pixels=settings.max_pixels,
                max_side=settings.max_side,
                max_decoded_bytes=settings.max_decoded,
                max_k=settings.max_k,
                max_batch=settings.max_batch,
                max_batch_json_bytes=settings.max_batch_json,
            ),
            # FAISS is installed by one of several packages
            versions={"lam": __version__, "faiss": faiss.__version__, **{name: version(name) for name in _VERSIONS}},
        )

    @app.get("/v1/calibration")
    async def get_calibration() -> state_models.CalibrationResponse:
        """The promised rates of thresholds, and the κ of the calibration."""
        if engine.responder.summary is None:
            allowed = "`lam calibrate RUN`, then a SIGHUP or a restart"
            raise ServiceError(404, "the run is not calibrated", allowed=allowed)
        return engine.responder.summary

    @app.get("/v1/samples")
    async def list_samples() -> state_models.SamplesResponse:
        """List a few inputs to try the run with: some of its classes, and an item of a class that it lacks."""
        samples = [
            state_models.SampleFields(
                source=sample.source,
                stranger=sample.stranger,
                text=sample.text,
                image=None if sample.image is None else f"/v1/samples/{number}",
            )
            for number, sample in enumerate(engine.samples)
        ]
        return state_models.SamplesResponse(samples=samples)

    @app.get("/v1/samples/{number}", response_class=Response, responses=schema.SAMPLE)
    async def get_sample(
        request: Request, number: Annotated[int, PathParameter(ge=0, description="from 0 on")]
    ) -> Response:
        """Look up the file of a sample image, to send it as a query."""
        image = engine.samples[number].image if number < len(engine.samples) else None
        if image is None:
            raise ServiceError(404, "there is no image of this number", allowed="the images of GET /v1/samples")
        return picture(request, image)

    @app.get("/metrics", response_class=Response, responses=schema.METRICS)
    async def get_metrics() -> Response:
        """Report metrics in the format of Prometheus."""
        return Response(await asyncio.to_thread(metrics.text), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/v1/feedback", responses=responses_of(models.FeedbackResponse), openapi_extra=schema.FEEDBACK)
    async def give_feedback(request: Request) -> Response:
        """Tell what an answer should have been; the promised error rates are tested on it."""
        feedback = await read_json(engine, request, feedback_of, engine.watcher)
        return json_response(await engine.judge(feedback))

    @app.post("/v1/backup", status_code=201, responses=responses_of(state_models.BackupResponse, 201))
    async def create_backup() -> Response:
        """Copy the run with its present items. When the response arrives, the copy is checked and on disk."""
        backup = await engine.back_up()
        files = [state_models.FileFields(**asdict(file)) for file in backup.files]
        answer = state_models.BackupResponse(
            name=backup.folder.name, created=backup.created, items=backup.items, bytes=backup.bytes, files=files
        )
        return json_response(answer, 201)

    @app.post("/v1/reload", responses=responses_of(state_models.ReloadResponse))
    async def reload_run() -> Response:
        """Read the calibration again; if the run's folder now links to another run, serve that run instead."""
        try:
            now = await reload()
        except (OSError, ValueError) as error:
            what = f"the run stays as it was: {error}"
            raise ServiceError(409, what, allowed="a run that `lam serve` opens") from None
        size = len(now.gallery)
        answer = state_models.ReloadResponse(
            run=now.run.folder.name,
            exchanged=now is not engine,
            calibration=now.responder.state(size),
            gallery_size=size,
        )
        return json_response(answer)


def _promise(watch: Watch) -> state_models.PromiseFields | None:
    state, tests = watch.state, [state_models.TestFields(**asdict(reading)) for reading in watch.readings]
    return None if state is None else state_models.PromiseFields(state=state, tests=tests)

"""The routes of the service itself, and their JSON: its state, samples and metrics, feedback, backups and reloads."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi import Path as PathParameter
from pydantic import Field

from lam import __version__
from lam.gallery.refusal import Refusal, busy
from lam.service import models, schema
from lam.service.bodies import feedback_of
from lam.service.engine import Engine
from lam.service.metrics import Metrics
from lam.service.schema import json_response, picture, read_json, responses_of
from lam.service.watch import Watch

_VERSIONS = ("torch", "pillow", "fastapi", "uvicorn", "uvloop")


class SampleFields(models.Answer):
    """An input to try the run with."""

    source: Annotated[str, Field(description="its split, or its set of strangers")]
    stranger: Annotated[bool, Field(description="whether the run's own gallery lacks its class")]
    text: str | None
    image: Annotated[str | None, Field(description="path of its file")]


class SamplesResponse(models.Answer):
    """Inputs to try the run with."""

    samples: list[SampleFields]


class HealthResponse(models.Answer):
    """The process answers."""

    status: Literal["alive"] = "alive"


class ReadyResponse(models.Answer):
    """Requests can be served now."""

    status: Literal["ready"] = "ready"
    gallery_size: models.Count


class LimitFields(models.Answer):
    """The limits of a request."""

    max_bytes: models.Count
    max_json_bytes: models.Count
    max_pixels: models.Count
    max_side: models.Count
    max_decoded_bytes: models.Count
    max_k: models.Count
    max_batch: models.Count
    max_batch_json_bytes: models.Count


class RecallFields(models.Answer):
    """Recall of the index against an exact search, at the start. A query is a stored item, left out of its own hits."""

    queries: Annotated[models.Count, Field(description="number of queries")]
    k: models.Positive
    recall: Annotated[models.Share, Field(description="share of the k nearest neighbours among the hits")]
    hits: Annotated[models.Positive, Field(description="number of hits that a decision needs, or of all items")]
    unchanged: Annotated[models.Share, Field(description="share of queries with exactly the hits of an exact search")]


class TestFields(models.Answer):
    """A test of the promise."""

    name: Annotated[str, Field(description="`kappa`, `cosine`: tests on queries; `far`, `wrong`: tests on feedback")]
    evidence: Annotated[float, Field(description="wealth of bets against the promise; 1 at the beginning")]
    peak: Annotated[float, Field(description="greatest evidence so far")]
    needed: Annotated[float, Field(description="evidence at which the test raises a permanent alarm")]
    n: Annotated[models.Count, Field(description="number of queries or judged answers")]
    errors: Annotated[int | None, Field(description="errors among the judged answers; null for queries")]
    limit: Annotated[models.Share | None, Field(description="rate of errors that chance allows; null for queries")]


class PromiseFields(models.Answer):
    """Whether the promises hold."""

    state: models.PromiseState
    tests: list[TestFields]


class ModelResponse(models.Answer):
    """The run that answers."""

    run: Annotated[str, Field(description="name of its folder")]
    kind: Annotated[str, Field(description="kind of the encoder")]
    gallery: Annotated[str, Field(description="what an item is an example of: a class, an identity, a place")]
    answers: Annotated[bool, Field(description="whether questions search for answers")]
    sha256: models.Digest
    dimension: models.Positive
    device: str
    preprocessing: Annotated[dict[str, Any] | None, Field(description="preprocessing of inputs")]
    calibration: models.State
    promise: Annotated[PromiseFields | None, Field(description="null without calibration")]
    threshold: models.SearchThresholds | None
    gallery_size: models.Count
    index: Annotated[str, Field(description="its FAISS type, or the address of a Milvus collection")]
    index_recall: Annotated[RecallFields | None, Field(description="null for exact searches, and for Milvus")]
    limits: LimitFields
    versions: Annotated[dict[str, str], Field(description="versions of lam and its main dependencies, by name")]


class FileFields(models.Answer):
    """A file of a backup."""

    name: str
    bytes: models.Count
    sha256: models.Digest


class BackupResponse(models.Answer):
    """A copy of the run and its items at one moment, in a folder beside the run's; `lam serve` opens it."""

    name: Annotated[str, Field(description="name of its folder")]
    created: Annotated[str, Field(description="when it began, in UTC", json_schema_extra={"format": "date-time"})]
    items: models.Count
    bytes: models.Count
    files: list[FileFields]


class ReloadResponse(models.Answer):
    """The run that answers after a reload."""

    run: Annotated[str, Field(description="name of its folder")]
    exchanged: Annotated[bool, Field(description="whether another run was opened; else only its calibration was read")]
    calibration: models.State
    gallery_size: models.Count


def add_state(app: FastAPI, engine: Engine, metrics: Metrics, reload: Callable[[], Awaitable[Engine]]) -> None:
    """Add the routes of the service itself; `reload` returns the engine that then answers."""

    @app.head("/v1/health", include_in_schema=False)
    @app.get("/v1/health")
    async def get_health() -> HealthResponse:
        """The process answers."""
        return HealthResponse()

    @app.head("/v1/ready", include_in_schema=False)
    @app.get("/v1/ready")
    async def get_ready() -> ReadyResponse:
        """Whether requests can be served now."""
        if complaints := engine.complaints:
            raise busy("; ".join(complaints))
        return ReadyResponse(gallery_size=len(engine.gallery))

    @app.get("/v1/model")
    async def get_model() -> ModelResponse:
        """The run that answers: hashes, calibration, limits and versions."""
        import faiss

        encoder, settings, recall = engine.embedder.encoder, engine.settings, engine.gallery.recall
        return ModelResponse(
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
            else RecallFields(
                queries=recall.n_queries, k=recall.k, recall=recall.share, hits=recall.depth, unchanged=recall.unchanged
            ),
            limits=LimitFields(
                max_bytes=settings.max_body,
                max_json_bytes=engine.json_limits.max_json,
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
    async def get_calibration() -> models.CalibrationResponse:
        """The promised rates of thresholds, and the κ of the calibration."""
        if engine.responder.summary is None:
            raise Refusal(404, "the run is not calibrated", allowed="`lam calibrate RUN`, then a SIGHUP or a restart")
        return engine.responder.summary

    @app.get("/v1/samples")
    async def list_samples() -> SamplesResponse:
        """List a few inputs to try the run with: some of its classes, and an item of a class that it lacks."""
        samples = [
            SampleFields(
                source=sample.source,
                stranger=sample.stranger,
                text=sample.text,
                image=None if sample.image is None else f"/v1/samples/{number}",
            )
            for number, sample in enumerate(engine.samples)
        ]
        return SamplesResponse(samples=samples)

    @app.get("/v1/samples/{number}", response_class=Response, responses=schema.SAMPLE)
    async def get_sample(
        request: Request, number: Annotated[int, PathParameter(ge=0, description="from 0 on")]
    ) -> Response:
        """Look up the file of a sample image, to send it as a query."""
        image = engine.samples[number].image if number < len(engine.samples) else None
        if image is None:
            raise Refusal(404, "there is no image of this number", allowed="the images of GET /v1/samples")
        return picture(request, image)

    @app.get("/metrics", response_class=Response, responses=schema.METRICS)
    async def get_metrics() -> Response:
        """Report metrics in the format of Prometheus."""
        return Response(await asyncio.to_thread(metrics.text), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/v1/feedback", responses=responses_of(models.FeedbackResponse), openapi_extra=schema.FEEDBACK)
    async def give_feedback(request: Request) -> Response:
        """Give the true label of an answer, or say whether it is right; the service tests its error rates on this."""
        feedback = await read_json(engine, request, feedback_of, engine.watcher)
        return json_response(await engine.judge(*feedback))

    @app.post("/v1/backup", status_code=201, responses=responses_of(BackupResponse, 201))
    async def create_backup() -> Response:
        """Copy the run with its present items. When the response arrives, the copy is checked and on disk."""
        backup = await engine.back_up()
        files = [FileFields(**asdict(file)) for file in backup.files]
        answer = BackupResponse(
            name=backup.folder.name, created=backup.created, items=backup.items, bytes=backup.bytes, files=files
        )
        return json_response(answer, 201)

    @app.post("/v1/reload", responses=responses_of(ReloadResponse))
    async def reload_run() -> Response:
        """Read the calibration again; if the run's folder now links to another run, serve that run instead."""
        try:
            now = await reload()
        except (OSError, ValueError) as error:
            raise Refusal(409, f"the run stays as it was: {error}", allowed="a run that `lam serve` opens") from None
        size = len(now.gallery)
        run, calibration = now.run.folder.name, now.responder.state(size)
        exchanged = now is not engine
        return json_response(ReloadResponse(run=run, exchanged=exchanged, calibration=calibration, gallery_size=size))


def _promise(watch: Watch) -> PromiseFields | None:
    state, tests = watch.state, [TestFields(**asdict(reading)) for reading in watch.readings]
    return None if state is None else PromiseFields(state=state, tests=tests)

"""JSON of answers about the service itself: state, samples, calibration, backups and errors."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lam.service import models


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
    needed: Annotated[float, Field(description="evidence from which the test alarms, for good")]
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


class FalseAcceptPoint(models.Answer):
    """The rates of a threshold on the statistic."""

    threshold: float | None
    rate: Annotated[models.Share, Field(description="at most this share of queries without a match is a `match`")]
    recall: Annotated[models.Share, Field(description="share of queries with a match that find it")]


class FalseFlagPoint(models.Answer):
    """The rate of a threshold on κ."""

    kappa: models.Kappa
    rate: Annotated[
        models.Share, Field(description="at most this share of queries like the calibration queries is flagged")
    ]


class HistogramFields(models.Answer):
    """Counts of values between edges."""

    counts: Sequence[models.Count]
    edges: Annotated[Sequence[float], Field(description="one more than counts")]


class ReliabilityFields(models.Answer):
    """Share of right first hits in bins of their probability; null for an empty bin."""

    confidence: list[models.Share | None]
    accuracy: list[models.Share | None]
    count: list[models.Count]


class CalibrationResponse(models.Answer):
    """The promised rates of thresholds, and facts on the calibration."""

    threshold: models.SearchThresholds
    gallery_size: models.Count
    accept: models.Accept
    accept_name: Annotated[str, Field(description="`accept` in words")]
    share_without_match: models.Share | None
    false_accept: list[FalseAcceptPoint]
    false_flag: list[FalseFlagPoint]
    kappa: HistogramFields
    reliability: ReliabilityFields
    depth: Annotated[int | None, Field(description="number of `conformal` hits of a query")]
    facts: Annotated[dict[str, Any], Field(description="data of the calibration, and the scope of its bounds")]


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


class ErrorResponse(models.Answer):
    """The error of a request, and what is allowed."""

    error: str
    allowed: Any
    request_id: Annotated[str | None, Field(description="as in the header X-Request-ID and in the log")]

"""JSON of answers about the service itself: state, samples, calibration, backups and errors."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lam.service.models import (
    Accept,
    Answer,
    Count,
    Digest,
    Kappa,
    Positive,
    PromiseState,
    SearchThresholds,
    Share,
    State,
)


class SampleFields(Answer):
    """An input to try the run with."""

    source: Annotated[str, Field(description="its split, or its set of strangers")]
    stranger: Annotated[bool, Field(description="whether the run's own gallery lacks its class")]
    text: str | None
    image: Annotated[str | None, Field(description="path of its file")]


class SamplesResponse(Answer):
    """Inputs to try the run with."""

    samples: list[SampleFields]


class HealthResponse(Answer):
    """The process answers."""

    status: Literal["alive"] = "alive"


class ReadyResponse(Answer):
    """Requests can be served now."""

    status: Literal["ready"] = "ready"
    gallery_size: Count


class LimitFields(Answer):
    """The limits of a request."""

    max_bytes: Count
    max_json_bytes: Count
    max_pixels: Count
    max_side: Count
    max_decoded_bytes: Count
    max_k: Count
    max_batch: Count
    max_batch_json_bytes: Count


class RecallFields(Answer):
    """Recall of the index against an exact search, at the start. A query is a stored item, left out of its own hits."""

    queries: Annotated[Count, Field(description="number of queries")]
    k: Positive
    recall: Annotated[Share, Field(description="share of the k nearest neighbours among the hits")]
    hits: Annotated[Positive, Field(description="number of hits that a decision needs, or of all items")]
    unchanged: Annotated[Share, Field(description="share of queries with exactly the hits of an exact search")]


class TestFields(Answer):
    """A test of the promise."""

    name: Annotated[str, Field(description="`kappa`, `cosine`: tests on queries; `far`, `wrong`: tests on feedback")]
    evidence: Annotated[float, Field(description="wealth of bets against the promise; 1 at the beginning")]
    peak: Annotated[float, Field(description="greatest evidence so far")]
    needed: Annotated[float, Field(description="evidence from which the test alarms, for good")]
    n: Annotated[Count, Field(description="number of queries or judged answers")]
    errors: Annotated[int | None, Field(description="errors among the judged answers; null for queries")]
    limit: Annotated[Share | None, Field(description="rate of errors that chance allows; null for queries")]


class PromiseFields(Answer):
    """Whether the promises hold."""

    state: PromiseState
    tests: list[TestFields]


class ModelResponse(Answer):
    """The run that answers."""

    run: Annotated[str, Field(description="name of its folder")]
    kind: Annotated[str, Field(description="kind of the encoder")]
    gallery: Annotated[str, Field(description="what an item is an example of: a class, an identity, a place")]
    answers: Annotated[bool, Field(description="whether questions search for answers")]
    sha256: Digest
    dimension: Positive
    device: str
    preprocessing: Annotated[dict[str, Any] | None, Field(description="preprocessing of inputs")]
    calibration: State
    promise: Annotated[PromiseFields | None, Field(description="null without calibration")]
    threshold: SearchThresholds | None
    gallery_size: Count
    index: Annotated[str, Field(description="its FAISS type, or the address of a Milvus collection")]
    index_recall: Annotated[RecallFields | None, Field(description="null for exact searches, and for Milvus")]
    limits: LimitFields
    versions: Annotated[dict[str, str], Field(description="versions of lam and its main dependencies, by name")]


class FalseAcceptPoint(Answer):
    """The rates of a threshold on the statistic."""

    threshold: float | None
    rate: Annotated[Share, Field(description="at most this share of queries without a match is a `match`")]
    recall: Annotated[Share, Field(description="share of queries with a match that find it")]


class FalseFlagPoint(Answer):
    """The rate of a threshold on κ."""

    kappa: Kappa
    rate: Annotated[Share, Field(description="at most this share of queries like the calibration queries is flagged")]


class HistogramFields(Answer):
    """Counts of values between edges."""

    counts: Sequence[Count]
    edges: Annotated[Sequence[float], Field(description="one more than counts")]


class ReliabilityFields(Answer):
    """Share of right first hits in bins of their probability; null for an empty bin."""

    confidence: list[Share | None]
    accuracy: list[Share | None]
    count: list[Count]


class CalibrationResponse(Answer):
    """The promised rates of thresholds, and facts on the calibration."""

    threshold: SearchThresholds
    gallery_size: Count
    accept: Accept
    accept_name: Annotated[str, Field(description="`accept` in words")]
    share_without_match: Share | None
    false_accept: list[FalseAcceptPoint]
    false_flag: list[FalseFlagPoint]
    kappa: HistogramFields
    reliability: ReliabilityFields
    depth: Annotated[int | None, Field(description="number of `conformal` hits of a query")]
    facts: Annotated[dict[str, Any], Field(description="data of the calibration, and the scope of its bounds")]


class FileFields(Answer):
    """A file of a backup."""

    name: str
    bytes: Count
    sha256: Digest


class BackupResponse(Answer):
    """A copy of the run and its items at one moment, in a folder beside the run's; `lam serve` opens it."""

    name: Annotated[str, Field(description="name of its folder")]
    created: Annotated[str, Field(description="when it began, in UTC", json_schema_extra={"format": "date-time"})]
    items: Count
    bytes: Count
    files: list[FileFields]


class ReloadResponse(Answer):
    """The run that answers after a reload."""

    run: Annotated[str, Field(description="name of its folder")]
    exchanged: Annotated[bool, Field(description="whether another run was opened; else only its calibration was read")]
    calibration: State
    gallery_size: Count


class ErrorResponse(Answer):
    """The error of a request, and what is allowed."""

    error: str
    allowed: Any
    request_id: Annotated[str | None, Field(description="as in the header X-Request-ID and in the log")]

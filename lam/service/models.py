"""JSON of answers: models that pydantic serializes, and that the OpenAPI schema describes.

`lam.service.routes.state` has the answers about the service itself, `lam.service.requests` the JSON of requests.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema
from typing_extensions import TypeAliasType

from lam.retrieval.decisions.abstention import Decision
from lam.tuning.ambiguity import Doubt

JSON = "application/json"


# The schema states the ranges of answers but does not enforce them: a number rounded past 1 must not fail an answer.
Kappa = Annotated[float, Field(json_schema_extra={"minimum": 0})]
Cosine = Annotated[float, Field(json_schema_extra={"minimum": -1.000001, "maximum": 1.000001})]
Share = Annotated[float, Field(json_schema_extra={"minimum": 0, "maximum": 1})]
Count = Annotated[int, Field(json_schema_extra={"minimum": 0})]
Positive = Annotated[int, Field(json_schema_extra={"minimum": 1})]
Digest = Annotated[str, Field(json_schema_extra={"pattern": "^[0-9a-f]{64}$"})]
Cut = Annotated[bool, Field(description="the network read only the beginning of the text")]
Accept = Annotated[str, Field(description="the deciding statistic: `probability`, or a score such as `cosine`")]


def _set_aside(text: str, info: Any) -> int:
    """Collect stored metadata, and return a zero in their place; `Answer.to_json` puts them back."""
    info.context.append(text)
    return 0


_PLACE = b'"metadata":0'  # in a text, the quotes would be escaped
Metadata = Annotated[
    str, PlainSerializer(_set_aside, when_used="json", return_type=int), WithJsonSchema({"type": "object"})
]
UnknownFields = Annotated[
    list[str], Field(description="if none passes, fields of the filter that no item has, or not with the range's type")
]
AnswerId = Annotated[str, Field(description="for `POST /v1/feedback`")]
PromiseState = Annotated[
    Literal["holds", "in doubt", "broken"],
    Field(description="whether the promised rates hold, by all queries and feedback since the calibration"),
]
State = Annotated[Literal["none", "current", "stale"], Field(description="whether it fits the gallery's present size")]


class Answer(BaseModel):
    """A JSON object as an answer; a number that is not finite becomes null."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)

    def to_json(self) -> bytes:
        """The answer as JSON.

        Stored metadata are JSON already, and are inserted as text. 100 hits may have 1.6 MB of metadata; parsing and
        serializing these would hold Python's lock for longer than a search takes.
        """
        stored: list[str] = []
        first, *others = self.model_dump_json(context=stored).encode().split(_PLACE)
        parts = [b'"metadata":%s%s' % (text.encode(), part) for text, part in zip(stored, others, strict=True)]
        return b"".join([first, *parts])


class _Thresholds(Answer):
    kappa_below: Annotated[Kappa, Field(description="if κ decides, a κ below this is flagged")]
    far: Annotated[Share, Field(description="at most this share of queries without a match is a `match`")]
    ood: Annotated[Share, Field(description="at most this share of queries like the calibration queries is flagged")]


class PairThresholds(_Thresholds):
    """The thresholds of pairs, and their promised rates."""

    accept_above: Annotated[Cosine, Field(description="a pair with a cosine above this is a `match`")]


class SearchThresholds(_Thresholds):
    """The thresholds of searches, and their promised rates."""

    accept: Accept
    accept_above: Annotated[float | None, Field(description="a `statistic` above this is a `match`; null: no `match`")]
    flag: str
    flag_above: Annotated[float, Field(description="an `ood_score` above this is flagged")]
    conformal_miss: Annotated[Share, Field(description="`conformal` hits miss at most this share of queries' matches")]
    wrong: Annotated[Share | None, Field(description="at most this share of the answers `match` is wrong")]


class _Item(Answer):
    id: str
    label: str
    kappa: Kappa
    images: Positive
    resultant: Share
    uncertain: bool | None
    thumbnail: Annotated[str | None, Field(description="its path below the address of the run")]
    metadata: Metadata
    vector: Annotated[list[float] | None, Field(description="null without `with_vector`")] = None


class Hit(_Item):
    """An item that a search found."""

    score: Cosine
    accepted: Annotated[bool | None, Field(description="true for the first hit of a `match` and hits of its label")]
    credible: bool
    conformal: bool | None
    interval: list[Cosine] | None = Field(
        None, description="90 % interval for the cosine between this item and another input of the query's class"
    )


class Group(Answer):
    """The nearest items of a label, best first."""

    label: str
    hits: list[Hit]


class UnseenFields(Answer):
    """Whether the gallery lacks the query's class; valid if the gallery is a random sample of queries."""

    p_new: Annotated[Share, Field(description="p-value of “the class is new”; small for a known class")]
    p_in_gallery: Annotated[Share, Field(description="p-value of “the class is known”; small for a new class")]


class FilterFields(Answer):
    """The part of the gallery that a filter leaves, and the promise that holds there."""

    items: Annotated[Count, Field(description="items that pass")]
    unknown_fields: UnknownFields
    far: Annotated[
        Share | None,
        Field(description="at most this share of queries without a match there is a `match`; null: no promise"),
    ]
    queries: Annotated[Count, Field(description="calibration queries, or classes of strangers, behind the promise")]


class SearchResponse(Answer):
    """The answer to a search. Without a decision, the fields of a decision are null."""

    decision: Decision | None = None
    probability: Annotated[Share | None, Field(description="P(first hit right): `known` · `right_if_known`")] = None
    known: Annotated[Share | None, Field(description="P(the gallery holds a match)")] = None
    right_if_known: Annotated[Share | None, Field(description="P(first hit right | the gallery holds a match)")] = None
    accept: Accept | None = None
    statistic: Annotated[float | None, Field(description="above `threshold.accept_above`: a `match`")] = None
    false_accept: Annotated[Share | None, Field(description="share of searches without match as good as this")] = None
    ood_score: Annotated[float | None, Field(description="value of `flagged_by`; higher is more unusual")] = None
    p_value: Annotated[Share | None, Field(description="share of calibration queries as unusual as this")] = None
    flagged_by: Annotated[str | None, Field(description="the score that flags unusual queries: `abstain`")] = None
    doubt: Annotated[Doubt | None, Field(description="why the query is uncertain")] = None
    p_known: Share | None = None
    kappa_aleatoric: Kappa | None = None
    kappa_epistemic: Kappa | None = None
    kappa: Kappa
    kappa_capped: bool
    text_cut: Cut
    credible_cosine: Cosine
    unseen: Annotated[UnseenFields | None, Field(description="null if the gallery cannot tell")]
    threshold: SearchThresholds | None
    calibration: State
    promise: Annotated[PromiseState | None, Field(description="null if the promise does not count the search")] = None
    answer_id: Annotated[AnswerId | None, Field(description="null if the promise does not count the search")] = None
    gallery_size: Count
    filter: Annotated[FilterFields | None, Field(description="null without a filter")] = None
    hits: Annotated[list[Hit], Field(description="empty with `group_by`")]
    groups: Annotated[list[Group] | None, Field(description="null without `group_by`")] = None


class RefusedPart(Answer):
    """The refusal of one query or item of a batch."""

    status: Annotated[int, Field(description="the HTTP status that it would have alone")]
    error: str
    allowed: Any


SearchOrRefusal = TypeAliasType("SearchOrRefusal", SearchResponse | RefusedPart)


class SearchBatchResponse(Answer):
    """The answers to a batch of queries, in their order; a refused query does not stop the others."""

    answers: list[SearchOrRefusal]


class EmbedResponse(Answer):
    """The embedding of an image or a text, in the form that a search by embedding takes."""

    embedding: Annotated[list[float], Field(description="a unit vector")]
    kappa: Kappa
    kappa_capped: bool
    uncertain: Annotated[bool | None, Field(description="whether κ is below the flag; null without calibration")]
    text_cut: Cut


class VerifyResponse(Answer):
    """The answer to a comparison. Without a decision, the fields of a decision are null."""

    same: bool | None = None
    decision: Decision | None = None
    probability: Annotated[Share | None, Field(description="P(match), if half of all pairs match")] = None
    score: Cosine
    far: Annotated[Share | None, Field(description="at most this share of pairs without match is a `match`")] = None
    threshold: PairThresholds | None = None
    kappa: Annotated[list[Kappa], Field(min_length=2, max_length=2)]
    text_cut: Annotated[list[Cut], Field(min_length=2, max_length=2)]


class ItemResponse(_Item):
    """An item."""

    sha256: Digest


class EnrolResponse(ItemResponse):
    """An added item. The status is 201 for a new id, 200 for an existing id."""

    created: bool
    kappa_capped: bool
    text_cut: Cut
    calibration: State
    gallery_size: Count


EnrolOrRefusal = TypeAliasType("EnrolOrRefusal", EnrolResponse | RefusedPart)


class EnrolBatchResponse(Answer):
    """The items of a batch, in their order; with `on_error=good`, also refusals."""

    items: list[EnrolOrRefusal]
    stored: Count
    gallery_size: Count


class ListResponse(Answer):
    """A page of items, and the id after which the next page begins; this id is null on the last page."""

    items: list[ItemResponse]
    after: str | None
    total: Annotated[Count, Field(description="items that pass the filter, or all")]
    unknown_fields: UnknownFields


class DeleteResponse(Answer):
    """The gallery after a deletion."""

    id: str
    deleted: Literal[True] = True
    gallery_size: Count


class DeleteItemsResponse(Answer):
    """The gallery after the deletion of all items that pass a filter."""

    deleted: Count
    unknown_fields: UnknownFields
    gallery_size: Count


class FeedbackResponse(Answer):
    """Counted feedback."""

    counted: Annotated[
        list[str], Field(description="the tests that count it: `far`, `wrong`; none for a stranger counted before")
    ]
    promise: PromiseState


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

    counts: tuple[Count, ...]
    edges: Annotated[tuple[float, ...], Field(description="one more than counts")]


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


class ErrorResponse(Answer):
    """The error of a request, and the allowed values."""

    error: str
    allowed: Any
    request_id: Annotated[str | None, Field(description="as in the header X-Request-ID and in the log")]

"""What requests and answers in JSON hold: said once, by which requests are refused, answers typed and OpenAPI written.

All are typed dictionaries. Requests are checked by them; answers, which are checked by pyright and by schemathesis in
`tests/service/test_schema.py`, are not, as that would take longer than to make them. Which numbers are a unit vector is
decided in `lam.service.bodies`, which text is an id or a label in `lam.gallery.item`.
"""

from functools import cache
from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    with_config,
)
from pydantic.json_schema import JsonSchemaMode
from typing_extensions import TypeAliasType, TypedDict

from lam.gallery.item import ID_RULE, MAX_LABEL, MAX_METADATA
from lam.service.errors import ServiceError
from lam.service.images import CONTENT_TYPES
from lam.tuning.ambiguity import Doubt

JSON = "application/json"
MAX_KAPPA = 1e30
_SHOWN = 80


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class _Closed(TypedDict):
    """What has no other names, and numbers that are finite; so has what derives from it."""


class EmbeddingRequest(_Closed):
    """One embedding."""

    embedding: Annotated[list[float], FailFast(), Field(description="a unit vector")]
    kappa: Annotated[float, Field(ge=0, le=MAX_KAPPA, description="its concentration")]


class ImageRequest(_Closed):
    """A file of an image."""

    image: Annotated[str, Field(description="base64", json_schema_extra={"format": "byte"})]


class TextRequest(_Closed):
    """A text, of a run on texts; of a long one the beginning counts."""

    text: Annotated[str, Field(min_length=1, description="not blank, and at most as much as JSON may hold")]


class _ItemFacts(_Closed):
    id: NotRequired[Annotated[str, Field(description=f"{ID_RULE}; the same as beside the body, where it is there too")]]
    label: NotRequired[
        Annotated[str, Field(description="what it shows; likewise", json_schema_extra={"maxLength": MAX_LABEL})]
    ]
    metadata: NotRequired[Annotated[dict[str, Any], Field(description=f"at most {MAX_METADATA} characters of JSON")]]


class ItemRequest(EmbeddingRequest, _ItemFacts):
    """An item by its embedding."""


class TextItemRequest(TextRequest, _ItemFacts):
    """An item by its text, which its metadata then have as `text`."""


def kind_of(part: Any) -> Literal["image", "text", "embedding"]:
    """What JSON holds, by its names."""
    names = part if isinstance(part, dict) else ()
    return "image" if "image" in names else "text" if "text" in names else "embedding"


ImageTextOrEmbedding = TypeAliasType(
    "ImageTextOrEmbedding",
    Annotated[
        Annotated[ImageRequest, Tag("image")]
        | Annotated[TextRequest, Tag("text")]
        | Annotated[EmbeddingRequest, Tag("embedding")],
        Discriminator(kind_of),
    ],
)
TextOrEmbedding = TypeAliasType("TextOrEmbedding", EmbeddingRequest | TextRequest)
TextOrEmbeddingItem = TypeAliasType("TextOrEmbeddingItem", ItemRequest | TextItemRequest)


class PairRequest(_Closed):
    """Two things that are compared."""

    first: ImageTextOrEmbedding
    second: ImageTextOrEmbedding


Kappa = Annotated[float, Field(ge=0)]
Cosine = Annotated[float, Field(ge=-1.000001, le=1.000001)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Cut = Annotated[bool, Field(description="only the beginning of the text was read, being longer than the network reads")]
_ACCEPT = "what decides: `probability`, or a score such as `cosine`; its `statistic` is higher where the hit is better"
Metadata = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]
Verdict = Literal["match", "unknown", "abstain"] | None
State = Annotated[
    Literal["none", "current", "stale"], Field(description="whether the calibration is of such a gallery")
]


class _Thresholds(_Closed):
    kappa_below: Annotated[Kappa, Field(description="a κ below this is flagged where κ decides")]
    far: Annotated[Share, Field(description="of what has no match, at most this share is a `match`")]
    ood: Annotated[Share, Field(description="of queries like those calibrated on, at most this share is flagged")]


class PairThresholds(_Thresholds):
    """What is in force for pairs, and the rates that it promises."""

    accept_above: Annotated[Cosine, Field(description="a pair of a cosine above this is a `match`")]


class SearchThresholds(_Thresholds):
    """What is in force for searches."""

    accept: Annotated[str, Field(description=_ACCEPT)]
    accept_above: Annotated[
        float | None,
        Field(description="a `statistic` above this is a `match`; null where no threshold keeps what is promised"),
    ]
    flag: str
    flag_above: Annotated[float, Field(description="an `ood_score` above this is flagged")]
    conformal_miss: Annotated[
        Share, Field(description="of queries that have a match, at most this share has none among the `conformal` hits")
    ]
    wrong: Annotated[
        Share | None,
        Field(
            description="of those answered with `match`, at most this share is wrong; null where that is not promised"
        ),
    ]


class ItemFields(_Closed):
    """What is said of every item, beside its metadata, which are JSON already when they are written."""

    id: str
    label: str
    kappa: Kappa
    images: Annotated[int, Field(ge=1)]
    resultant: Share
    uncertain: bool | None
    thumbnail: str | None


class HitFields(ItemFields):
    """A hit, beside its metadata."""

    score: Cosine
    accepted: Annotated[
        bool | None,
        Field(description="of a `match` the first hit, and what has the same label; null where nothing is decided"),
    ]
    credible: bool
    conformal: bool | None


class Hit(HitFields):
    """A hit."""

    metadata: Metadata


class DecisionFields(_Closed):
    """What was decided, and what it rests on."""

    decision: Verdict
    probability: Annotated[
        Share | None,
        Field(
            description="that the gallery holds a match and the first hit is one: `known` · `right_if_known`, stated "
            "for the share of queries without a match that the calibration expects (`share_without_match` there)"
        ),
    ]
    known: Annotated[
        Share | None, Field(description="that the gallery holds a match at all, stated for the same share of queries")
    ]
    right_if_known: Annotated[
        Share | None, Field(description="that the first hit is right, if the gallery holds a match")
    ]
    accept: Annotated[str | None, Field(description=_ACCEPT)]
    statistic: Annotated[
        float | None,
        Field(description="what decides: a `match` is above `threshold.accept_above`; null where there is no hit"),
    ]
    false_accept: Annotated[
        Share | None, Field(description="of searches without a match, the share that look as good by the statistic")
    ]
    ood_score: Annotated[float | None, Field(description="of the query by `flagged_by`; higher is more unusual")]
    p_value: Annotated[Share | None, Field(description="of queries like those calibrated on, the share as unusual")]
    flagged_by: Annotated[str | None, Field(description="the score that says whether the query can be judged")]


class UnseenFields(_Closed):
    """Whether the query is of a class that the gallery does not hold, if the gallery is a random sample of queries."""

    p_new: Annotated[Share, Field(description="of “this item is of a new class”: small means that its class is here")]
    p_in_gallery: Annotated[
        Share,
        Field(description="of “this item is of a class in the gallery”: small means that it is of no class"),
    ]


class DoubtFields(_Closed):
    """Why a query is uncertain, where the encoder has learnt its ambiguity."""

    doubt: Doubt | None
    p_known: Share | None
    kappa_aleatoric: Kappa | None
    kappa_epistemic: Kappa | None


class SearchFields(DecisionFields, DoubtFields):
    """The answer to a search, beside its hits."""

    kappa: Kappa
    kappa_capped: bool
    text_cut: Cut
    credible_cosine: Cosine
    unseen: Annotated[
        UnseenFields | None,
        Field(
            description="p-values, of the gallery as it was calibrated on; null where the gallery cannot tell, such as "
            "without a class of one item, or where an item is searched by"
        ),
    ]
    threshold: SearchThresholds | None
    calibration: State
    gallery_size: Count


class SearchResponse(SearchFields):
    """The answer to a search."""

    hits: list[Hit]


class VerifyResponse(_Closed):
    """The answer to a comparison."""

    same: bool | None
    decision: Verdict
    probability: Annotated[Share | None, Field(description="that the two match, where half of all pairs do")]
    score: Cosine
    far: Annotated[Share | None, Field(description="of pairs that do not match, at most this share is a `match`")]
    threshold: PairThresholds | None
    kappa: Annotated[list[Kappa], Field(min_length=2, max_length=2)]
    text_cut: Annotated[list[Cut], Field(min_length=2, max_length=2)]


class StoredFields(ItemFields):
    """An item, beside its metadata."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ItemResponse(StoredFields):
    """An item."""

    metadata: Metadata


class EnrolResponse(ItemResponse):
    """An item that was put into the gallery."""

    created: bool
    kappa_capped: bool
    text_cut: Cut
    calibration: State
    gallery_size: Count


class ListResponse(_Closed):
    """A page of items."""

    items: list[ItemResponse]
    after: str | None
    total: Count


class SampleFields(_Closed):
    """An input of the run to try it with."""

    source: Annotated[str, Field(description="the part of the data, or the set of strangers, that it is of")]
    stranger: Annotated[bool, Field(description="whether nothing in the run's own gallery matches it")]
    text: str | None
    image: Annotated[str | None, Field(description="where the file is")]


class SamplesResponse(_Closed):
    """What there is to try the run with."""

    samples: list[SampleFields]


class DeleteResponse(_Closed):
    """What is left once an item is gone."""

    id: str
    deleted: Literal[True]
    gallery_size: Count


class HealthResponse(_Closed):
    """That the process answers."""

    status: Literal["alive"]


class ReadyResponse(_Closed):
    """That requests can be served now."""

    status: Literal["ready"]
    gallery_size: Count


class LimitFields(_Closed):
    """What a request may bring."""

    max_bytes: Count
    max_json_bytes: Count
    max_pixels: Count
    max_side: Count
    max_decoded_bytes: Count
    max_k: Count


class RecallFields(_Closed):
    """How much the index found of an exact search at the start, for stored items as queries, each without itself."""

    queries: Annotated[Count, Field(description="how many items were searched for")]
    k: Annotated[int, Field(ge=1)]
    recall: Annotated[Share, Field(description="of the k nearest neighbours, this share was found")]
    hits: Annotated[int, Field(ge=1, description="on so many a decision rests, or on all that there are")]
    unchanged: Annotated[
        Share, Field(description="of these queries, this share found just the hits of an exact search")
    ]


class ModelResponse(_Closed):
    """What answers."""

    run: Annotated[str, Field(description="the name of its folder")]
    kind: Annotated[str, Field(description="of the encoder")]
    gallery: Annotated[str, Field(description="what an item stands for: a class, an identity, a place")]
    answers: Annotated[bool, Field(description="whether questions search for answers")]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    dimension: Annotated[int, Field(ge=1)]
    device: str
    preprocessing: Annotated[dict[str, Any] | None, Field(description="of images, before the network")]
    calibration: State
    threshold: SearchThresholds | None
    gallery_size: Count
    index: Annotated[str, Field(description="its FAISS type, or the address of a Milvus collection")]
    index_recall: Annotated[
        RecallFields | None, Field(description="null where searches are exact; of Milvus it is not measured")
    ]
    limits: LimitFields
    versions: Annotated[dict[str, str], Field(description="of lam and what it rests on, by name")]


class FalseAcceptPoint(_Closed):
    """What a threshold on the statistic would promise."""

    threshold: float
    rate: Annotated[Share, Field(description="of what has no match, at most this share is a `match`")]
    recall: Annotated[Share, Field(description="of what has a match, this share is found")]


class FalseFlagPoint(_Closed):
    """What a threshold on κ would promise."""

    kappa: Kappa
    rate: Annotated[Share, Field(description="of queries like those calibrated on, at most this share is flagged")]


class HistogramFields(_Closed):
    """How often values lay between two edges."""

    counts: list[Count]
    edges: Annotated[list[float], Field(description="one more than counts")]


class ReliabilityFields(_Closed):
    """How often first hits were right, by bins of their probability."""

    confidence: list[Share | None]
    accuracy: list[Share | None]
    count: list[Count]


class CalibrationResponse(_Closed):
    """Which rates thresholds promise, and how the calibration was made."""

    threshold: SearchThresholds | None
    gallery_size: Count
    accept: Annotated[str, Field(description=_ACCEPT)]
    accept_name: Annotated[str, Field(description="in words")]
    share_without_match: Share | None
    false_accept: list[FalseAcceptPoint]
    false_flag: list[FalseFlagPoint]
    kappa: HistogramFields
    reliability: ReliabilityFields
    depth: Annotated[int | None, Field(description="how many hits hold a match but for `conformal_miss`")]
    facts: Annotated[dict[str, Any], Field(description="of how it was made")]


class ErrorResponse(_Closed):
    """What was wrong, and what is allowed."""

    error: str
    allowed: Any


_adapter = cache(TypeAdapter)


def checked(content: Any, kind: type[Any]) -> Any:
    """Whether JSON that was read is of one of the kinds that are asked for.

    Args:
        content: what was read.
        kind: `EmbeddingRequest`, `ItemRequest`, `PairRequest`, `TextItemRequest` or `TextRequest`.

    Returns:
        It, as that kind.

    Raises:
        ServiceError: 422, in pydantic's words for the first thing that is wrong; allowed is what OpenAPI says.
    """
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:_SHOWN]
        allowed = schema_of(kind)["properties"]
        raise ServiceError(422, f"{place or 'the body'}: {first['msg']}", allowed=allowed) from None


@cache
def schema_of(kind: type[Any]) -> dict[str, Any]:
    """The schema of a request, with that of each of its parts in its place: OpenAPI keeps none beside it."""
    schema = _adapter(kind).json_schema()
    parts = schema.pop("$defs", {})

    def whole(node: Any) -> Any:
        if isinstance(node, list):
            return [whole(part) for part in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return whole(parts[node["$ref"].rpartition("/")[2]])
        return {name: whole(part) for name, part in node.items()}

    return whole(schema)


Responses = dict[int | str, dict[str, Any]]
_BINARY = {"type": "string", "format": "binary"}


def _answer(kind: type[Any], description: str, *statuses: int) -> Responses:
    return {status: {"model": kind, "description": description} for status in statuses or (200,)}


SEARCHED = _answer(SearchResponse, "the decision, what it rests on, and the nearest items")
VERIFIED = _answer(VerifyResponse, "whether they are the same, null where that cannot be judged")
ENROLLED = _answer(EnrolResponse, "the id was there; this is its item now") | _answer(
    EnrolResponse, "the id is new", 201
)
FOUND = _answer(ItemResponse, "the item")
LISTED = _answer(ListResponse, "items, and behind which id the next page begins; null at the end")
DELETED = _answer(DeleteResponse, "it is gone")
THUMBNAIL: Responses = {
    200: {"description": "the thumbnail", "content": {kind: {"schema": _BINARY} for kind in CONTENT_TYPES[:2]}},
    304: {"description": "it is still the one of the ETag in If-None-Match"},
}
SAMPLES = _answer(SamplesResponse, "a few inputs to try the run with; none where it has none")
SAMPLE: Responses = {**THUMBNAIL, 200: {**THUMBNAIL[200], "description": "the file of an image"}}
METRICS: Responses = {
    200: {"description": "metrics of Prometheus", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
REFUSALS = _answer(
    ErrorResponse,
    "what was wrong, and what is allowed",
    400,
    401,
    404,
    405,
    408,
    409,
    413,
    415,
    421,
    422,
    500,
    503,
    507,
)


SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "the key, where the service was started with one"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "the same key"},
}
_BODIES = (TextOrEmbedding, TextOrEmbeddingItem, PairRequest)


def request_schemas() -> dict[str, Any]:
    """The schemas of request bodies and their parts, by name, to which `QUERY`, `ITEM` and `PAIR` refer."""
    adapters: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]]
    adapters = [(kind.__name__, "validation", _adapter(kind)) for kind in _BODIES]
    _, schema = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    return schema["$defs"]


def _request(kind: Any, *, images: tuple[str, ...] = ()) -> dict[str, Any]:
    """A body of JSON of this kind, or of an image of one of these types."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    content = {**{image: {"schema": _BINARY} for image in images}, JSON: {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


QUERY = _request(TextOrEmbedding, images=CONTENT_TYPES)
ITEM = _request(TextOrEmbeddingItem, images=CONTENT_TYPES)
PAIR = _request(PairRequest)

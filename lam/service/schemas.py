"""What the OpenAPI schema says of requests and answers. What is right is decided elsewhere; this only tells it."""

from typing import Any

from lam.service.bodies import EMBEDDING_SCHEMA, IMAGE_SCHEMA, ITEM_SCHEMA, JSON, PAIR_SCHEMA
from lam.service.images import CONTENT_TYPES

Responses = dict[int | str, dict[str, Any]]
TEXT, NUMBER, YES_OR_NO = ({"type": kind} for kind in ("string", "number", "boolean"))
KAPPA = {"type": "number", "minimum": 0}
COSINE = {"type": "number", "minimum": -1.000001, "maximum": 1.000001}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
COUNT = {"type": "integer", "minimum": 0}
STATE = {"enum": ["none", "current", "stale"], "description": "whether the calibration is of such a gallery"}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """For what nobody knows without a calibration, or what an item need not have."""
    return {"anyOf": [schema, {"type": "null"}]}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object with these properties, all of them and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An answer in JSON."""
    return {"description": description, "content": {JSON: {"schema": schema}}}


DECISION = _or_null({"enum": ["match", "unknown", "abstain"]})
_SHOWN = {
    "id": TEXT,
    "label": TEXT,
    "kappa": KAPPA,
    "metadata": {"type": "object"},
    "images": {"type": "integer", "minimum": 1},
    "resultant": SHARE,
    "poor": _or_null(YES_OR_NO),
    "thumbnail": _or_null(TEXT),
}
_ITEM = {**_SHOWN, "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}
_RATES = {"far": SHARE, "ood": SHARE}
_THRESHOLD = _object(accept_above=COSINE, flag=TEXT, flag_above=NUMBER, kappa_below=KAPPA, miss=SHARE, **_RATES)
_OF_PAIRS = _object(accept_above=COSINE, kappa_below=KAPPA, **_RATES)
_HIT = _object(**_SHOWN, score=COSINE, accepted=_or_null(YES_OR_NO), credible=YES_OR_NO, conformal=_or_null(YES_OR_NO))
_ENROLLED = _object(**_ITEM, created=YES_OR_NO, kappa_capped=YES_OR_NO, calibration=STATE, gallery_size=COUNT)

SEARCHED: Responses = {
    200: _json(
        "the decision, what it rests on, and the nearest items",
        _object(
            decision=DECISION,
            probability=_or_null(SHARE),
            surprise=_or_null(NUMBER),
            p_value=_or_null(SHARE),
            flagged_by=_or_null(TEXT),
            kappa=KAPPA,
            kappa_capped=YES_OR_NO,
            credible_cosine=COSINE,
            threshold=_or_null(_THRESHOLD),
            calibration=STATE,
            gallery_size=COUNT,
            hits={"type": "array", "items": _HIT},
        ),
    )
}
VERIFIED: Responses = {
    200: _json(
        "whether they are the same, null where that cannot be judged",
        _object(
            same=_or_null(YES_OR_NO),
            decision=DECISION,
            probability=_or_null(SHARE),
            score=COSINE,
            far=_or_null(SHARE),
            threshold=_or_null(_OF_PAIRS),
            kappa={"type": "array", "items": KAPPA, "minItems": 2, "maxItems": 2},
        ),
    )
}
ENROLLED: Responses = {
    200: _json("the id was there; this is its item now", _ENROLLED),
    201: _json("the id is new", _ENROLLED),
}
FOUND: Responses = {200: _json("the item", _object(**_ITEM))}
LISTED: Responses = {
    200: _json(
        "items, and behind which id the next page begins; null at the end",
        _object(items={"type": "array", "items": _object(**_ITEM)}, after=_or_null(TEXT), total=COUNT),
    )
}
DELETED: Responses = {200: _json("it is gone", _object(id=TEXT, deleted={"const": True}, gallery_size=COUNT))}
PICTURE: Responses = {
    200: {"description": "the picture", "content": {kind: {"schema": IMAGE_SCHEMA} for kind in CONTENT_TYPES[:2]}}
}
REFUSALS: Responses = dict.fromkeys(
    (400, 401, 404, 405, 408, 409, 413, 415, 421, 422, 500, 503, 507),
    _json("what was wrong, and what is allowed", _object(error=TEXT, allowed={})),
)


def _request(json: dict[str, Any], kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    """A body of JSON, or of an image of one of these kinds."""
    content = {**{kind: {"schema": IMAGE_SCHEMA} for kind in kinds}, JSON: {"schema": json}}
    return {"requestBody": {"required": True, "content": content}}


QUERY = _request(EMBEDDING_SCHEMA, CONTENT_TYPES)
ITEM = _request(ITEM_SCHEMA, CONTENT_TYPES)
PAIR = _request(PAIR_SCHEMA)

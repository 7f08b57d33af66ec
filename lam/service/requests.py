"""JSON of requests: typed dictionaries that pydantic validates."""

from functools import cache
from typing import Annotated, Any, Literal, NotRequired

import pydantic
from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

from lam.gallery.item import ID_RULE, MAX_LABEL, MAX_METADATA
from lam.gallery.refusal import Refusal

MAX_KAPPA = 1e30
_SHOWN = 80
_Label = Annotated[str, Field(json_schema_extra={"maxLength": MAX_LABEL})]
_A_BATCH = Field(min_length=1, description="at most `limits.max_batch` of GET /v1/model")


@pydantic.with_config(pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class _Request(TypedDict):
    """JSON with the declared names only, and with finite numbers."""


class EmbeddingRequest(_Request):
    """One embedding."""

    embedding: Annotated[
        list[float],
        pydantic.FailFast(),
        pydantic.WrapValidator(lambda value, of_list: value if isinstance(value, str) else of_list(value)),
        pydantic.WithJsonSchema(
            {
                "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string", "format": "byte"}],
                "description": "a unit vector: a list of numbers, or base64 of 32-bit floats, little-endian",
            }
        ),
    ]
    kappa: Annotated[float, Field(ge=0, le=MAX_KAPPA, description="its concentration")]


class ImageRequest(_Request):
    """An image file."""

    image: Annotated[
        str,
        Field(description="base64, or a data URL: `data:image/png;base64,...`", json_schema_extra={"format": "byte"}),
    ]


class TextRequest(_Request):
    """A text; the network may read only its beginning."""

    text: Annotated[str, Field(min_length=1, description="not blank; the limit on JSON applies")]


class _ItemFacts(_Request):
    id: NotRequired[Annotated[str, Field(description=f"{ID_RULE}; must equal the id in the address, if any")]]
    label: NotRequired[Annotated[_Label, Field(description="equal to a label in the address")]]
    metadata: NotRequired[Annotated[dict[str, Any], Field(description=f"at most {MAX_METADATA} bytes of JSON")]]


class ItemRequest(EmbeddingRequest, _ItemFacts):
    """An item by its embedding."""


class TextItemRequest(TextRequest, _ItemFacts):
    """An item by its text, which is added to its metadata as `text`."""


class ImageItemRequest(ImageRequest, _ItemFacts):
    """An item by its image."""


class PatchRequest(_Request):
    """A change of an item's label or metadata."""

    label: NotRequired[_Label]
    metadata: NotRequired[
        Annotated[dict[str, Any], Field(description="new values by name; null removes a name, others stay")]
    ]


Kind = Literal["image", "text", "embedding"]
QUERIES: dict[Kind, type[Any]] = {"image": ImageRequest, "text": TextRequest, "embedding": EmbeddingRequest}
ITEMS: dict[Kind, type[Any]] = {"image": ImageItemRequest, "text": TextItemRequest, "embedding": ItemRequest}


def kind_of(part: Any) -> Kind:
    """The kind of a query or an item in JSON, by its names."""
    names = part if isinstance(part, dict) else ()
    return "image" if "image" in names else "text" if "text" in names else "embedding"


ImageTextOrEmbedding = TypeAliasType(
    "ImageTextOrEmbedding",
    Annotated[
        Annotated[ImageRequest, pydantic.Tag("image")]
        | Annotated[TextRequest, pydantic.Tag("text")]
        | Annotated[EmbeddingRequest, pydantic.Tag("embedding")],
        pydantic.Discriminator(kind_of),
    ],
)
ImageTextOrEmbeddingItem = TypeAliasType(
    "ImageTextOrEmbeddingItem",
    Annotated[
        Annotated[ImageItemRequest, pydantic.Tag("image")]
        | Annotated[TextItemRequest, pydantic.Tag("text")]
        | Annotated[ItemRequest, pydantic.Tag("embedding")],
        pydantic.Discriminator(kind_of),
    ],
)


class ItemBatchRequest(_Request):
    """Items to add in one request."""

    items: Annotated[list[ImageTextOrEmbeddingItem], _A_BATCH]


class SearchBatchRequest(_Request):
    """Queries to search for in one request."""

    queries: Annotated[list[ImageTextOrEmbedding], _A_BATCH]


class FeedbackRequest(_Request):
    """Feedback on an answer: its true `label`, or whether it is `correct`."""

    answer_id: Annotated[str, Field(max_length=_SHOWN, description="of an answer of `POST /v1/search`")]
    label: NotRequired[Annotated[_Label, Field(description="the true label; empty: no item is right")]]
    correct: NotRequired[Annotated[bool, Field(description="whether a `match` is right")]]


class PairRequest(_Request):
    """Two images, texts or embeddings to compare."""

    first: ImageTextOrEmbedding
    second: ImageTextOrEmbedding


adapter_of = cache(pydantic.TypeAdapter)


def validate(content: Any, kind: type[Any]) -> Any:
    """Validate JSON as a kind of request; an error (422) quotes pydantic's first message and the schema."""
    try:
        return adapter_of(kind).validate_python(content)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:_SHOWN]
        raise Refusal(422, f"{place or 'the body'}: {first['msg']}", allowed=schema_of(kind)["properties"]) from None


@cache
def schema_of(kind: type[Any]) -> dict[str, Any]:
    """The JSON schema of a request, with each reference replaced by the schema that it names."""
    schema = adapter_of(kind).json_schema()
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

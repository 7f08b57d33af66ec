"""The service against its own OpenAPI schema: all answers fit the schema, and no request makes it fail.

schemathesis makes requests that fit the schema, requests that break it in one place, and sequences of them, the same
ones in every run. This module adds images and unit vectors, which it does not know.
"""

import base64
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import strategies
from PIL import Image
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema
from schemathesis.engine.recorder import ScenarioRecorder

from lam.service.bodies import JSON
from lam.service.embedder import FORMATS
from lam.service.engine import Engine
from tests.service.asking import HOST, create_app
from tests.service.conftest import encoded

_REPR = "ignore:Generating overly large repr"  # of a strategy of hypothesis, not of anything that is asked
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings(_REPR)]
_UNLIKELY = ("DELETE /v1/items", "PATCH /v1/items/{id}", "POST /v1/feedback")
"""Operations that random requests rarely satisfy: a random text is neither a filter nor the id of an answer."""
_SHARED = "POST /v1/items/batch: Allow header mismatch"  # this is also the address of an item with the id `batch`
_REPORTED = {
    "POST /v1/items/batch: Schema-violating request accepted": "on_error=good",
    "POST /v1/search/batch: Schema-violating request accepted": "/properties/queries/items",
}
"""Complaints of batches whose bad parts get an error each in a 200, and what marks such a complaint."""
_OF_IMAGES = ("GET /v1/items/{id}/thumbnail", "GET /v1/samples/{number}")


def bodies(kind: str) -> strategies.SearchStrategy[bytes]:
    """Pictures, truncated pictures, and noise."""
    whole = [encoded(Image.effect_noise((9, 9), 60).convert("RGB"), kind), encoded(Image.new("L", (1, 1)), kind)]
    cut = [body[: len(body) // 2] for body in whole]
    return strategies.sampled_from(whole) | strategies.sampled_from(cut) | strategies.binary(max_size=99)


for name, content_type in FORMATS.items():
    schemathesis.openapi.media_type(content_type, bodies(name))
schemathesis.openapi.format("byte", bodies("PNG").map(lambda body: base64.b64encode(body).decode()))


@dataclass
class Found:
    """The outcome of many requests.

    Attributes:
        complaints: wrong answers, each with a command that repeats the request.
        statuses: statuses of each operation.
        requests: number of requests.
    """

    complaints: set[str] = field(default_factory=set)
    statuses: dict[str, set[int]] = field(default_factory=dict)
    requests: int = 0

    def add(self, recorded: ScenarioRecorder) -> None:
        """Count the answers, and collect the complaints."""
        labels = {name: node.value.operation.label for name, node in recorded.cases.items()}
        for name, interaction in recorded.interactions.items():
            assert interaction.response is not None, f"{labels[name]} gave no answer"
            self.statuses.setdefault(labels[name], set()).add(interaction.response.status_code)
            self.requests += 1
        for name, checks in recorded.checks.items():
            for failed in (check.failure_info for check in checks if check.failure_info is not None):
                told = failed.failure
                self.complaints.add(f"{labels[name]}: {told.title}: {told.message}\n{failed.code_sample}")


def described_by(engine: Engine, example: dict[str, Any]) -> Any:
    """The schema, with an example of a body."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(engine), headers={"host": "127.0.0.1"})
    for path, operations in schema.raw_schema["paths"].items():
        for operation in operations.values():
            if JSON in (contents := operation.get("requestBody", {}).get("content", {})):
                several = {
                    "/v1/verify": {"first": example, "second": example},
                    "/v1/search/batch": {"queries": [example]},
                    "/v1/items/batch": {"items": [example]},
                }
                contents[JSON]["example"] = several.get(path, example)
    return schema


@pytest.fixture(scope="module")
def described(shared_engine: Engine) -> Any:
    """The schema of a run on images, with an embedding as the example."""
    axis = [1.0] + [0.0] * (shared_engine.gallery.dimension - 1)
    return described_by(shared_engine, {"embedding": axis, "kappa": 50.0})


@pytest.fixture
def described_of_texts(served_texts: Path) -> Iterator[Any]:
    """The schema of a run on texts, with a text as the example."""
    engine = Engine(served_texts)
    yield described_by(engine, {"text": "where is thing7"})
    engine.close()


def asked(described: Any, examples: int) -> Found:
    """Send the requests that schemathesis generates."""
    config = SchemathesisConfig.from_dict(
        {
            "seed": 0,
            "base-url": HOST,
            "generation": {"max-examples": examples, "deterministic": True, "database": "none", "no-shrink": True},
            "checks": {
                "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "503", "507"]},
                "positive_data_acceptance": {"enabled": False},  # a schema cannot say which numbers are a unit vector
            },
        }
    )
    schema = schemathesis.openapi.from_dict(described.raw_schema, config=config)
    schema.app, found = described.app, Found()
    for event in from_schema(schema).execute():
        if isinstance(event, events.FatalError):
            raise event.exception
        if isinstance(event, events.NonFatalError):
            found.complaints.add(str(event.info))
        if isinstance(event, events.ScenarioFinished):
            found.add(event.recorder)
    return found


def conforms(described: Any, examples: int, *, without: Collection[str] = ()) -> Found:
    """Send requests to each operation: answers must fit the schema; each, except `without`, must succeed once."""
    found = asked(described, examples)
    complaints = {each for each in found.complaints if not each.startswith(_SHARED)}
    for start, mark in _REPORTED.items():
        complaints -= {each for each in complaints if each.startswith(start) and mark in each}
    assert not complaints, "\n\n".join(sorted(complaints))
    assert len(found.statuses) == sum(len(operations) for operations in described.raw_schema["paths"].values())
    for operation, statuses in found.statuses.items():
        assert statuses & {200, 201} or operation in without, f"{operation} never succeeded: {statuses}"
    return found


def test_whatever_is_asked_is_answered_as_the_schema_says(described: Any) -> None:
    assert conforms(described, 30, without=_UNLIKELY).requests > 400


def test_a_run_on_texts_answers_as_the_schema_says(described_of_texts: Any) -> None:
    found = conforms(described_of_texts, 10, without=(*_OF_IMAGES, *_UNLIKELY))
    assert {404} <= found.statuses["GET /v1/items/{id}/thumbnail"] <= {404, 405, 422}  # texts have no thumbnails
    assert found.requests > 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_is_asked_at_length_is_answered_as_the_schema_says(described: Any) -> None:
    assert conforms(described, 2000, without=_UNLIKELY).requests > 10_000

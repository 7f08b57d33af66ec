"""Refusals as JSON, results of several jobs, and the answer to a request at which the service fails."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lam.gallery.refusal import Refusal
from lam.service.tracing import request_id

Value = TypeVar("Value")
FAILED = Refusal(500, "the service failed at this request; its log says why")


def json_of(refusal: Refusal) -> dict[str, Any]:
    """The body of the answer to a refused request."""
    return {"error": refusal.error, "allowed": refusal.allowed, "request_id": request_id()}


def results_of(jobs: Iterable[Callable[[], Value]]) -> list[Value | Exception]:
    """The result of each job, or its exception."""
    results: list[Value | Exception] = []
    for job in jobs:
        try:
            results.append(job())
        except Exception as error:
            results.append(error)
    return results

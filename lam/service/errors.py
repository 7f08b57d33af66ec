"""Refusals as JSON, and the answer to a request at which the service fails."""

from collections.abc import Callable
from typing import Any, TypeVar

from lam.gallery.refusal import Refusal
from lam.service.tracing import request_id

Value = TypeVar("Value")
FAILED = Refusal(500, "the service failed at this request; its log says why")


def json_of(refusal: Refusal) -> dict[str, Any]:
    """The body of the answer to a refused request."""
    return {"error": refusal.error, "allowed": refusal.allowed, "request_id": request_id()}


def attempt(job: Callable[[], Value]) -> Value | Refusal:
    """The result of a job for one part of a batch, or the job's refusal."""
    try:
        return job()
    except Refusal as refusal:
        return refusal

"""Answers to refused requests, results of several jobs, and the answer to a request at which the service fails."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from starlette.responses import JSONResponse

from lam.gallery.refusal import Refusal
from lam.service.tracing import request_id

Value = TypeVar("Value")
FAILED = Refusal(500, "the service failed at this request; its log says why")


def answer_to(refusal: Refusal) -> JSONResponse:
    """The answer to a refused request."""
    body = {"error": refusal.error, "allowed": refusal.allowed, "request_id": request_id()}
    return JSONResponse(body, refusal.status, headers=refusal.headers)


def results_of(jobs: Iterable[Callable[[], Value]]) -> list[Value | Exception]:
    """The result of each job, or its exception."""
    results: list[Value | Exception] = []
    for job in jobs:
        try:
            results.append(job())
        except Exception as error:
            results.append(error)
    return results

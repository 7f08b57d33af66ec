"""`Refusal`, the error of a refused request or operation: its status, the problem, and the allowed values."""

from collections.abc import Mapping
from typing import Any


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault
    """A refused request or operation; unless the message says otherwise, nothing was changed.

    Args:
        status: the HTTP status. An operation on a gallery is refused with 403: another process writes the gallery
            (`read_only`); 409: it contradicts the stored items; 422: it can never succeed; 503: it can succeed later
            (`busy`); 507: it could not be stored (`full`).
        error: the problem.
        allowed: the allowed values, as JSON.
        headers: HTTP headers of the answer.
    """

    def __init__(
        self, status: int, error: str, *, allowed: Any = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.allowed = allowed
        self.headers = dict(headers or {})


def busy(what: str, *, after: int = 1) -> Refusal:
    """The refusal of an operation that can succeed after some seconds."""
    return Refusal(503, what, allowed=f"the same request after {after} s", headers={"Retry-After": str(after)})


def full(reason: str) -> Refusal:
    """The refusal of a change that could not be written to disk; earlier changes stay."""
    return Refusal(507, f"the change could not be stored ({reason}); nothing was changed", allowed="searches")


def read_only() -> Refusal:
    """The refusal of a change by a process that only reads the gallery."""
    what = "this service only reads its run: it was started with --replica"
    return Refusal(403, what, allowed="the change at a service that was started without --replica")

"""`ServiceError`, the error of a request: a status, what was wrong, and what is allowed."""

from collections.abc import Mapping
from typing import Any

from lam.gallery.refusal import Kind, Refusal
from lam.service.tracing import request_id

STATUS: dict[Kind, int] = {"invalid": 422, "conflict": 409, "busy": 503, "full": 507, "read_only": 403}


class ServiceError(Exception):
    """An error that answers a request.

    Args:
        status: HTTP status.
        error: what was wrong.
        allowed: what is allowed, as JSON.
        headers: headers of the answer.
    """

    def __init__(
        self, status: int, error: str, *, allowed: Any = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.allowed = allowed
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: "ServiceError | Refusal") -> "ServiceError":
        """The answer to an error of the service, the gallery or a queue."""
        if isinstance(error, ServiceError):
            return error
        headers = {} if error.after is None else {"Retry-After": str(error.after)}
        return cls(STATUS[error.kind], error.error, allowed=error.allowed, headers=headers)

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": self.error, "allowed": self.allowed, "request_id": request_id()}


FAILED = ServiceError(500, "the service failed at this request; its log says why")

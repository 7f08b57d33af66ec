"""`ServiceError`, the error of a request: a status, what was wrong, and what is allowed."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lam.gallery.refusal import Kind, Refusal
from lam.service.tracing import request_id

Value = TypeVar("Value")
STATUS: dict[Kind, int] = {"invalid": 422, "conflict": 409, "busy": 503, "full": 507, "read_only": 403}


class ServiceError(Exception):
    """An error that answers a request: HTTP status, what was wrong, and what is allowed, as JSON."""

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


def attempt(job: Callable[[], Value]) -> Value | ServiceError:
    """The result of a job for one part of a batch, or the job's refusal."""
    try:
        return job()
    except (ServiceError, Refusal) as error:
        return ServiceError.of(error)


FAILED = ServiceError(500, "the service failed at this request; its log says why")

"""What a request is refused with: a status, what was wrong, and what is allowed."""

from collections.abc import Mapping
from typing import Any


class ServiceError(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        error: what was wrong, for whoever sent the request.
        allowed: what would have been right, as JSON.
        headers: of the answer.
    """

    def __init__(
        self, status: int, error: str, *, allowed: Any = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.allowed = allowed
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": self.error, "allowed": self.allowed}


def busy(what: str, *, after: int = 1) -> ServiceError:
    """Give the answer to a request that cannot be served now but can be soon."""
    return ServiceError(503, what, allowed=f"the same request after {after} s", headers={"Retry-After": str(after)})


def full(reason: str) -> ServiceError:
    """Give the answer to a change that could not be made durable; what was acknowledged before stays."""
    return ServiceError(507, f"the change could not be stored ({reason}); nothing was changed", allowed="searches")


FAILED = ServiceError(500, "the service failed at this request; its log says why")

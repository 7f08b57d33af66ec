"""What a gallery refuses: of which kind, what was wrong, and what is allowed. Statuses of HTTP are the service's."""

from typing import Any, Literal

Kind = Literal["invalid", "conflict", "busy", "full"]


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault
    """Something that is asked of a gallery and is not done; nothing was changed, unless it says so.

    Args:
        kind: `invalid` for what can never be done, `conflict` for what does not fit what is there, `busy` for what can
            be done later, `full` for what could not be stored.
        error: what was wrong, for whoever asked.
        allowed: what would have been right, as JSON.
        after: seconds after which it may be asked again, where it is `busy`.
    """

    def __init__(self, kind: Kind, error: str, *, allowed: Any = None, after: int | None = None) -> None:
        super().__init__(error)
        self.kind: Kind = kind
        self.error = error
        self.allowed = allowed
        self.after = after


def busy(what: str, *, after: int = 1) -> Refusal:
    """Refuse what cannot be done now but can be soon."""
    return Refusal("busy", what, allowed=f"the same request after {after} s", after=after)


def full(reason: str) -> Refusal:
    """Refuse a change that could not be made durable; what was acknowledged before stays."""
    return Refusal("full", f"the change could not be stored ({reason}); nothing was changed", allowed="searches")

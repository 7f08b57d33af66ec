"""`Refusal`, the error of a refused operation on a gallery: its kind, what was wrong, and what is allowed."""

from typing import Any, Literal

Kind = Literal["invalid", "conflict", "busy", "full", "read_only"]


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault
    """A refused operation; unless the message says otherwise, nothing was changed.

    Args:
        kind: `invalid`: can never succeed; `conflict`: contradicts the stored items; `busy`: can succeed later;
            `full`: could not be stored; `read_only`: another process writes the gallery.
        error: what was wrong.
        allowed: what is allowed, as JSON.
        after: for `busy`, seconds until the next try.
    """

    def __init__(self, kind: Kind, error: str, *, allowed: Any = None, after: int | None = None) -> None:
        super().__init__(error)
        self.kind: Kind = kind
        self.error = error
        self.allowed = allowed
        self.after = after


def busy(what: str, *, after: int = 1) -> Refusal:
    """The refusal of an operation that can succeed after some seconds."""
    return Refusal("busy", what, allowed=f"the same request after {after} s", after=after)


def full(reason: str) -> Refusal:
    """The refusal of a change that could not be written to disk; earlier changes stay."""
    return Refusal("full", f"the change could not be stored ({reason}); nothing was changed", allowed="searches")


def read_only() -> Refusal:
    """The refusal of a change by a process that only reads the gallery."""
    what = "this service only reads its run: it was started with --replica"
    return Refusal("read_only", what, allowed="the change at a service that was started without --replica")

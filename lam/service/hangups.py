"""Blocks SIGHUP while a service starts or ends; at other times, SIGHUP makes the service reload its runs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_HANGUP = {signal.SIGHUP} if hasattr(signal, "SIGHUP") else set[signal.Signals]()


@contextmanager
def block_hangups() -> Iterator[None]:
    """Within the context, this thread and its new threads block SIGHUP; a SIGHUP that arrives meanwhile is dropped."""
    before = _change_mask(signal.SIG_BLOCK)
    try:
        yield
    finally:
        if _HANGUP and not _HANGUP & before:
            handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            _change_mask(signal.SIG_UNBLOCK)
            signal.signal(signal.SIGHUP, handler)


@contextmanager
def unblock_hangups() -> Iterator[None]:
    """Within the context, SIGHUP arrives, even if it was sent earlier; set a handler for it first."""
    _change_mask(signal.SIG_UNBLOCK)
    try:
        yield
    finally:
        _change_mask(signal.SIG_BLOCK)


def _change_mask(how: int) -> set[int]:
    return set(signal.pthread_sigmask(how, _HANGUP)) if _HANGUP else set()

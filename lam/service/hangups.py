"""SIGHUP, which asks a service to read its calibration anew: it waits while the service starts or ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_HANGUP = {signal.SIGHUP} if hasattr(signal, "SIGHUP") else set[signal.Signals]()


@contextmanager
def hangups_waiting() -> Iterator[None]:
    """Keep SIGHUP waiting in this thread and those that it starts; one that still waits at the end is dropped."""
    before = _change_mask(signal.SIG_BLOCK)
    try:
        yield
    finally:
        if _HANGUP and not _HANGUP & before:
            handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            _change_mask(signal.SIG_UNBLOCK)
            signal.signal(signal.SIGHUP, handler)


@contextmanager
def hangups_served() -> Iterator[None]:
    """Let SIGHUP through, one that waited too, once its handler is set."""
    _change_mask(signal.SIG_UNBLOCK)
    try:
        yield
    finally:
        _change_mask(signal.SIG_BLOCK)


def _change_mask(how: int) -> set[int]:
    return set(signal.pthread_sigmask(how, _HANGUP)) if _HANGUP else set()

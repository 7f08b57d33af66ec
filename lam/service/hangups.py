"""Blocks SIGHUP while a service starts or ends; at other times, SIGHUP makes the service reload its runs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_HANGUP = {signal.SIGHUP}


@contextmanager
def block_hangups() -> Iterator[None]:
    """Within the context, this thread and its new threads block SIGHUP; a SIGHUP that arrives meanwhile is dropped."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANGUP)
    try:
        yield
    finally:
        if signal.SIGHUP not in before:
            handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANGUP)
            signal.signal(signal.SIGHUP, handler)


@contextmanager
def unblock_hangups() -> Iterator[None]:
    """Within the context, SIGHUP arrives, even if it was sent earlier; set a handler for it first."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANGUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANGUP)

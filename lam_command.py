"""The command `lam`. It lies outside the package `lam`, so that Ctrl-C during the package's imports is quiet."""

import os
import signal
import sys


def _stop(*_: object) -> None:
    os._exit(130)


def _hush() -> None:
    """Let Ctrl-C end the process with 130, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell lets background commands ignore Ctrl-C
        signal.signal(signal.SIGINT, _stop)


def main() -> int:
    """Exit status of the command line, see `lam.cli.main`; Ctrl-C during its imports ends the process with 130."""
    _hush()
    from lam.cli import main as run

    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if sys.argv[:1] == ["-m"] and ("-m", "lam") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False):
    # `python -m lam` imports the package, which imports this module first
    _hush()

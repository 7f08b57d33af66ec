"""The command `lam`. It lies outside the package `lam`, so that Ctrl-C during the package's imports is quiet."""

import os
import signal


def main() -> int:
    """Exit status of the command line, see `lam.cli.main`; Ctrl-C during its imports ends the process with 130."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a shell lets commands in the background ignore Ctrl-C
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from lam.cli import main as run

    signal.signal(signal.SIGINT, handler)
    return run()

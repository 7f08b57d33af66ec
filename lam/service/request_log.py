"""The log of requests, as JSON lines without keys, item ids, labels, and contents of requests."""

import json
import logging
import sys
import threading
from collections import deque
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_MOST = 10_000  # lines in memory while the disk is slow
STDERR = "-"


class RequestLog:
    """Writes lines in a thread, so that no request waits for a disk; lines that a slow disk cannot take are dropped.

    The file is opened anew for each batch of lines, so it may be renamed and compressed meanwhile. A file that cannot
    be written raises an `OSError` at once.

    Args:
        target: file for all requests, or `-` for standard error; None logs only slow requests, on standard error.
        slow: seconds from which a request is marked as slow; None marks no request.
    """

    def __init__(self, target: str | Path | None, slow: float | None = None) -> None:
        self._target, self._slow = target, slow
        self._lines: deque[str] = deque()
        self._changed, self._closing, self._dropped = threading.Condition(), False, 0
        if target not in (None, STDERR):
            with closing(self._open(target)):
                pass
        self._thread = threading.Thread(target=self._write, name="lam request log", daemon=True)
        self._thread.start()

    def note(self, seconds: float, **fields: Any) -> None:
        """Log a request."""
        is_slow = self._slow is not None and seconds >= self._slow
        if self._target is None and not is_slow:
            return
        slow = {} if self._slow is None else {"slow": is_slow}
        with self._changed:
            if len(self._lines) >= _MOST:
                self._dropped += 1
                return
            fields |= {"dropped": self._dropped} if self._dropped else {}
            self._dropped = 0
            self._lines.append(json.dumps({**fields, "seconds": round(seconds, 6), **slow}))
            self._changed.notify()

    def close(self) -> None:
        """Write the lines that wait, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                lines, is_last = list(self._lines), self._closing
                self._lines.clear()
            try:
                with nullcontext(sys.stderr) if self._target in (None, STDERR) else self._open(self._target) as file:
                    file.write("".join(f"{line}\n" for line in lines))
                    file.flush()
            except (OSError, ValueError) as error:  # a closed stream is a ValueError
                _LOG.error("%d lines of the request log are lost: %s", len(lines), error)
            if is_last:
                return

    @staticmethod
    def _open(target: Any) -> Any:
        return Path(target).open("a", encoding="utf-8")

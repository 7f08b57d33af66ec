"""Connections that do no good, from a process of their own: python -m tests.service.crowding PORT WAY COUNT SECONDS."""

import contextlib
import errno
import json
import select
import socket
import sys
import time
from collections import Counter

WAYS = ("closed", "idle", "unread", "pings")
_PAUSE = 1.0
_GET = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: key\r\n\r\n"
_FIRST = {
    "closed": _GET % b"/v1/health",
    "idle": b"",
    "unread": _GET % b"/v1/items?limit=1000" * 3,
    "pings": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
}
_PING = b"\0\0\x08\6\0\0\0\0\0" + b"12345678"
KEPT_READING = 4096  # bytes that may lie unread at a client that does not read


def opened(port: int, way: str) -> socket.socket:
    """A connection that has sent what it sends first."""
    connection = socket.socket()
    connection.settimeout(5)
    if way == "unread":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KEPT_READING)
    connection.connect(("127.0.0.1", port))
    connection.sendall(_FIRST[way])
    return connection


def closing(port: int, seconds: float) -> Counter[str]:
    """One request a connection, which the client closes without saying so before; what came of them."""
    outcomes: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with opened(port, "closed") as connection:
                outcomes[connection.recv(100)[9:12].decode()] += 1
        except OSError as error:
            outcomes[errno.errorcode.get(error.errno or 0, type(error).__name__)] += 1
    return outcomes


def keeping(port: int, way: str, count: int, seconds: float) -> Counter[str]:
    """So many connections that stay; what is closed is opened anew, once a second."""
    outcomes: Counter[str] = Counter()
    until, kept = time.monotonic() + seconds, list[socket.socket]()
    while time.monotonic() < until:
        begun = time.monotonic()
        while len(kept) < count and time.monotonic() < until:
            try:
                kept.append(opened(port, way))
                outcomes["opened"] += 1
            except OSError as error:
                outcomes[errno.errorcode.get(error.errno or 0, type(error).__name__)] += 1
        while time.monotonic() < min(until, begun + _PAUSE):
            time.sleep(0.05)
        kept = [connection for connection in kept if _stays(connection, way)]
    outcomes["kept"] = len(kept)
    for connection in kept:
        connection.close()
    return outcomes


def _stays(connection: socket.socket, way: str) -> bool:
    with contextlib.suppress(OSError):
        if way == "pings":
            connection.sendall(_PING)
        poll = select.poll()  # select takes no descriptor beyond 1023
        poll.register(connection, select.POLLHUP | select.POLLERR | select.POLLRDHUP)
        if not poll.poll(0):
            return True
    connection.close()
    return False


if __name__ == "__main__":
    port, way, count, seconds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    found = closing(port, seconds) if way == "closed" else keeping(port, way, count, seconds)
    print(json.dumps(found))

"""Harmful connections from a separate process, from one or several addresses of this machine.

python -m tests.service.crowding PORT WAY COUNT SECONDS ADDRESSES
"""

import contextlib
import errno
import json
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle

WAYS = ("closed", "idle", "unread", "dripped", "chunks", "upgraded", "pings")
_PAUSE = 1.0
_GET = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: key\r\n\r\n"
_POST = b"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: key\r\nContent-Type: image/png\r\n"
_UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n"
_FIRST = {
    "closed": _GET % b"/v1/health",
    "idle": b"",
    "unread": _GET % b"/v1/items?limit=1000",
    "dripped": _POST + b"Content-Length: 1000\r\n\r\n",
    "chunks": _POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000,
    "upgraded": (_GET % b"/v1/health")[:-2] + _UPGRADE,
    "pings": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
}
_LATER = {"dripped": b"x", "pings": b"\0\0\x08\6\0\0\0\0\0" + b"12345678"}  # once a second
KEPT_READING = 4096  # bytes that may wait at a client that does not read


def opened(port: int, way: str, address: str) -> socket.socket:
    """A connection that has sent its first bytes."""
    connection = socket.socket()
    connection.settimeout(5)
    try:
        if way == "unread":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KEPT_READING)
        connection.bind((address, 0))
        connection.connect(("127.0.0.1", port))
        connection.sendall(_FIRST[way])
    except OSError:
        connection.close()
        raise
    return connection


def closing(port: int, addresses: Iterator[str], rate: int, seconds: float) -> Counter[str]:
    """Open connections at a rate per second, or as fast as they are answered, and close each without warning."""
    outcomes: Counter[str] = Counter()
    due = time.monotonic()
    until = due + seconds
    while time.monotonic() < until:
        due += 1 / rate
        time.sleep(max(0, due - time.monotonic()))
        try:
            with opened(port, "closed", next(addresses)) as connection:
                outcomes[connection.recv(100)[9:12].decode()] += 1
        except OSError as error:
            outcomes[errno.errorcode.get(error.errno or 0, type(error).__name__)] += 1
    return outcomes


def keeping(port: int, way: str, addresses: Iterator[str], count: int, seconds: float) -> Counter[str]:
    """Keep `count` connections open, all opened within half of the time; closed ones are opened again."""
    outcomes: Counter[str] = Counter()
    until, kept, pause = time.monotonic() + seconds, list[socket.socket](), seconds / (2 * count)
    while time.monotonic() < until:
        begun = time.monotonic()
        while len(kept) < count and time.monotonic() < min(until, begun + _PAUSE):
            time.sleep(pause)
            try:
                kept.append(opened(port, way, next(addresses)))
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
        connection.sendall(_LATER.get(way, b""))
        poll = select.poll()  # select takes no descriptor beyond 1023
        poll.register(connection, select.POLLHUP | select.POLLERR | select.POLLRDHUP)
        if not poll.poll(0):
            return True
    connection.close()
    return False


if __name__ == "__main__":
    port, way, count, seconds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    addresses = cycle([f"127.0.0.{2 + number}" for number in range(int(sys.argv[5]))])
    if way == "closed":
        found = closing(port, addresses, count, seconds)
    else:
        found = keeping(port, way, addresses, count, seconds)
    print(json.dumps(found))

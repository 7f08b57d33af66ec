"""uvicorn's connection with deadlines and caps.

uvicorn has no deadline for the headers of a request or for reading an answer, and no cap on connections. It closes a
connection if the client stops sending and has not read the answer. It parses any number of small chunks of a body in
one step. `lam.service.limits` has the deadline for a body.
"""

import asyncio
from collections import Counter
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lam.service.settings import ServiceSettings

_REFUSED = 64
_PIECE = 8192  # h11 checks its limit of 16 KiB on headers once for each piece
_PIECE_OF_BODY = 2**18  # limited, too: headers of the next request may follow a body in one piece
_CHUNKS, _CHUNK = 64, 512  # a body may have 64 chunks of any size, and one more for each 512 bytes


class OpenConnections:
    """The open connections, with a cap for all clients and a cap for each client.

    Above a cap, a new connection replaces the connection that has waited longest for its client. If no connection waits
    for its client, the new one is refused.

    Args:
        of_client: greatest number of connections from one address; None for `most`, the cap on all connections.
    """

    def __init__(self, most: int, of_client: int | None) -> None:
        self._most, self._of_client = most, most if of_client is None else of_client
        self._open: set[Connection] = set()
        self._of: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}  # idle for longest first
        self._refused: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, new: "Connection") -> bool:
        """Count a new connection; False if it is refused. If many refused ones are open, it is closed at once."""
        room = self._of[new.address] < self._of_client or self.drop_waiting(new.address)
        if room and (len(self._open) < self._most or self.drop_waiting()):
            self._open.add(new)
            self._of[new.address] += 1
            return True
        if len(self._refused) >= _REFUSED:
            new.transport.abort()
        self._refused.add(new)
        return False

    def remove(self, one: "Connection") -> None:
        """Remove a closed connection."""
        self._waiting.pop(one, None)
        self._refused.discard(one)
        if one in self._open:
            self._open.remove(one)
            self._of[one.address] -= 1
            if not self._of[one.address]:
                del self._of[one.address]

    def note_activity(self, one: "Connection", *, waits: bool) -> None:
        """Note activity on a connection, and whether the connection waits for its client now."""
        self._waiting.pop(one, None)
        if waits and one in self._open:
            self._waiting[one] = None

    def drop_waiting(self, address: str | None = None, *, reading: bool = False) -> bool:
        """Close the connection that has waited longest, of this client or with an unread answer; False without one."""
        for one in self._waiting:
            if address in (None, one.address) and (one.awaited == "reading" or not reading):
                one.transport.abort()
                self.remove(one)
                return True
        return False


class Connection(H11Protocol):
    """A connection with deadlines for headers and for reading answers; above the cap, `refuse` answers its requests.

    `awaited` is "headers" or "reading" (of an answer) while the connection waits for its client, else None.
    """

    def __init__(
        self, connections: OpenConnections, settings: ServiceSettings, refuse: ASGIApp, **options: Any
    ) -> None:
        super().__init__(**options)
        self.conn = _Requests(h11.SERVER)
        self.address = ""
        self._connections, self._refuse = connections, refuse
        self._seconds = {"headers": settings.header_seconds, "reading": settings.write_seconds}
        self.awaited: str | None = None
        self._no_more_comes = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop's transports do not derive from asyncio's
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._connections.add(self):
            self.app = self._refuse
        self._follow()

    def data_received(self, data: bytes) -> None:
        start = 0
        while start < len(data) and not self.transport.is_closing():
            reads_body = self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body
            end = start + (_PIECE_OF_BODY if reads_body else _PIECE)
            super().data_received(data[start:end])
            start = end
        self._follow()

    def eof_received(self) -> Any:
        """Keep the connection until its request is answered. It counts as waiting, because the client may be gone."""
        self._no_more_comes = True
        self._follow()
        return self._is_answering

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._no_more_comes and not self._is_answering:
            self.transport.close()
        self._follow()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._follow()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self._unset_keepalive_if_required()  # else uvicorn's timer keeps a connection that its client has reset
        self._connections.remove(self)
        super().connection_lost(exc)

    def _follow(self) -> None:
        """Set the present deadline; the deadline for reading an answer applies until the whole answer is sent."""
        between = self.cycle is None or self.cycle.response_complete
        if self.flow.write_paused or (self.awaited == "reading" and not between):
            self._await("reading")
        else:
            self._await("headers" if between else None)
        waits = self.awaited is not None or self._no_more_comes or self.cycle.more_body
        self._connections.note_activity(self, waits=waits)

    def _await(self, what: str | None) -> None:
        if what == self.awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self.awaited = what
        self._deadline = None if what is None else self.loop.call_later(self._seconds[what], self.transport.abort)


class _Requests(h11.Connection):
    """Requests with a limit on chunks, because a chunk takes as long to parse as kilobytes without chunks."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._size = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._size += len(event.data)
            if self._chunks > _CHUNKS + self._size // _CHUNK:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        return event

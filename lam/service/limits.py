"""Checks host, key, size and deadline of every request before its route runs; adds headers to answers; logs requests.

The whole body is read here, so routes never wait for a client. FastAPI limits neither the size nor the time of a body.
`lam.service.connections` has the deadlines for sending headers and for reading an answer.
"""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import quote, unquote

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import Message, Receive, Scope, Send

from lam.gallery.refusal import Refusal, busy
from lam.service.app import FAILED, PREFIX, Site, Sites, answer_to
from lam.service.keys import GUARDED, OPEN_PATHS, RIGHTS, Keys, right_for
from lam.service.settings import ServiceSettings
from lam.service.tracing import HEADER, RequestLog, Spans, Trace, traced

_WITH_IMAGES = ("/v1/search", "/v1/embed", "/v1/verify", "/v1/items")  # their JSON may hold images
HTTP_VERSIONS = ("1.0", "1.1")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, PATCH, DELETE",
    "Access-Control-Allow-Headers": f"Authorization, Content-Type, If-None-Match, X-API-Key, {HEADER}",
    "Access-Control-Max-Age": "600",
}
_PIECE = 2**16
_ADDRESS = re.compile(rb"https?://(?P<host>[^/]*)(?P<path>.*)", re.IGNORECASE | re.DOTALL)
_CHEAP_A_SECOND = 30  # requests that need no worker: number that one connection may send without delay
_PAUSE = 0.05  # delay of further requests in seconds: workers run meanwhile
_NEW_A_SECOND = 100  # number of connections of one address that may begin with such a request without delay
_NEW_PAUSE = 0.02  # delay on further connections in seconds: short, as a health check may come from the same address
_PAUSED = (401, 403, 503)  # statuses after which clients try again at once
_METHOD = 16  # characters of a method in the log
_LOG = logging.getLogger(__name__)


class Limits:
    """An ASGI application that checks every request and passes it to the run in its path.

    Args:
        keys: all requests except for the page and the two health checks need a key, as `Authorization: Bearer KEY` or
            `X-API-Key: KEY`. Without keys, the host in a request must be this machine.
        spans: opens spans of OpenTelemetry, if given.
    """

    def __init__(
        self,
        sites: Sites,
        settings: ServiceSettings,
        *,
        keys: Keys | None = None,
        log: RequestLog | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._sites, self._settings = sites, settings
        self._keys, self._log, self._spans = keys, log, spans
        self._held = 0
        self._joining = asyncio.Lock()
        self.make_room: Callable[[], object] = lambda: None  # called when memory is full
        self._second, self._cheap = 0, Counter[object]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            await self._traced(scope, receive, send)
        else:
            await self._sites.first.app(scope, receive, send)

    async def refuse_connection(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request on a connection above the cap."""
        await self._traced(scope, receive, send, refused=busy("too many connections are open"))

    async def _traced(self, scope: Scope, receive: Receive, send: Send, *, refused: Refusal | None = None) -> None:
        scope = _in_origin_form(scope)
        headers = {name.lower(): value for name, value in scope["headers"]}
        with traced(headers, self._spans) as trace:
            added = {HEADER: trace.id, **_cors_headers(self._settings.cors_origins, headers)}
            await self._http(scope, headers, receive, _Sender(send, self._hold, added), trace, refused)

    async def _http(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        send: "_Sender",
        trace: Trace,
        refused: Refusal | None,
    ) -> None:
        body, started, site = None, time.perf_counter(), self._sites.first
        site.requests += 1
        try:
            if refused is not None:
                raise refused
            if scope["http_version"] not in HTTP_VERSIONS:
                raise Refusal(505, "the service speaks HTTP/1.1, not HTTP/2", allowed=HTTP_VERSIONS)
            if b"content-length" in headers and b"transfer-encoding" in headers:
                raise Refusal(400, "the body has Content-Length and Transfer-Encoding", allowed="one of them")
            self._require_host(headers)
            found, path = self._sites.find(scope["path"])
            if found is None:
                name = scope["path"].removeprefix(PREFIX)
                if scope["method"] in ("GET", "HEAD") and name in self._sites:
                    redirect = RedirectResponse(f"./{quote(name)}/")  # relative, as a proxy may add a prefix
                    await redirect(scope, receive, send)
                    return
                self._require_right(scope["method"], GUARDED[0], headers)
                addresses = [f"{PREFIX}{name}/" for name in self._sites]
                raise Refusal(404, "there is no run of this name", allowed=addresses)
            if path != scope["path"]:
                site.requests -= 1
                site, scope = found, {**scope, "path": path, "raw_path": path.encode()}
                site.requests += 1
            is_preflight = (
                scope["method"] == "OPTIONS"
                and b"access-control-request-method" in headers
                and "Access-Control-Allow-Origin" in send.added
            )
            if not is_preflight:
                self._require_right(scope["method"], scope["path"], headers)
            if pause := self._pause(scope, is_cheap=is_preflight):
                await asyncio.sleep(pause)
            if is_preflight:
                await Response(None, 204, _PREFLIGHT)(scope, receive, send)
                return
            if scope["path"] not in OPEN_PATHS:
                self._require_memory()
            body = await self._body(self._limit(site, scope, headers), headers, receive)
            await site.app(scope, _replay(body, receive), send)
        except Refusal as refusal:
            if refusal.status in _PAUSED:
                await asyncio.sleep(_PAUSE)
            await send.refuse(refusal)
            if body is None:
                await _linger(receive, self._settings.linger_seconds)
            await send.end()
        except asyncio.CancelledError:  # the server shuts down and no longer waits
            await send.refuse(busy("the service is shutting down", after=5))
        except _GoneError:
            return
        except Exception:
            _LOG.exception("the request %s failed", trace.id)
            await send.refuse(FAILED)
            await send.end()
        finally:
            site.requests -= 1
            self._hold(-len(body or b""))
            route = getattr(scope.get("route"), "path_format", "other")
            seconds = time.perf_counter() - started
            site.count(route, scope["method"], send.status, seconds)
            trace.facts |= {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "id": trace.id,
                "client": next(iter(scope.get("client") or ()), None),
                "method": scope["method"][:_METHOD],
                "run": site.name,
                "route": route,
                "status": send.status,
                "received": len(body or b""),
                "sent": send.sent,
                "stages": {name: round(each, 6) for name, each in trace.stages.items()},
            }
            if self._log is not None:
                self._log.note(seconds, **trace.facts)

    def _pause(self, scope: Scope, *, is_cheap: bool) -> float:
        """Seconds to delay a request that needs no worker; 0 unless its connection or address has sent many of them."""
        if not is_cheap and scope["path"].startswith(GUARDED) and scope["path"] not in OPEN_PATHS:
            return 0.0
        if (second := int(time.monotonic())) != self._second:
            self._second, self._cheap = second, Counter()
        client = tuple(scope.get("client") or ())  # ASGI allows any iterable here
        self._cheap[client] += 1
        if self._cheap[client] > _CHEAP_A_SECOND:
            return _PAUSE
        if self._cheap[client] > 1:
            return 0.0
        address = client[:1]
        self._cheap[address] += 1
        return _NEW_PAUSE if self._cheap[address] > _NEW_A_SECOND else 0.0

    def _require_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Without keys, reject foreign host names, which a page of another site can use by DNS rebinding."""
        host = headers.get(b"host", b"").decode("latin1")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._keys is None and name.lower().removesuffix(".") not in LOCAL_HOSTS:
            raise Refusal(421, "without a key only requests to this machine are answered", allowed=LOCAL_HOSTS)

    def _require_right(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self._keys is None or path in OPEN_PATHS or not path.startswith(GUARDED):
            return
        key = headers.get(b"x-api-key", b"")
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer":
            key = bearer.strip()
        right, needed = self._keys.right_of(key), right_for(method, path)
        if right is None:
            allowed, asked = "Authorization: Bearer KEY, or X-API-Key: KEY", {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, "the API key is missing or wrong", allowed=allowed, headers=asked)
        if (least := RIGHTS.index(needed)) > RIGHTS.index(right):
            what = f"the key has the right {right!r}, and this request needs {needed!r}"
            raise Refusal(403, what, allowed=RIGHTS[least:])

    def _require_memory(self) -> None:
        if self._held > self._settings.max_held:
            raise busy("the bodies and answers in memory are at their limit")

    def _hold(self, size: int) -> None:
        self._held += size
        if size > 0 and self._held > self._settings.max_held:
            self.make_room()

    def _limit(self, site: Site, scope: Scope, headers: Mapping[bytes, bytes]) -> int:
        """Maximum bytes of the body. If JSON may hold images, `lam.service.bodies` limits the other bytes."""
        is_json = headers.get(b"content-type", b"").strip().lower().startswith(b"application/json")
        holds_images = scope["method"] in ("POST", "PUT") and scope["path"].startswith(_WITH_IMAGES)
        return site.max_json if is_json and not holds_images else self._settings.max_body

    async def _body(self, limit: int, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Read the whole body; its bytes count as memory in use until the request is answered."""
        too_large = Refusal(413, f"the body is larger than {limit} bytes", allowed={"max_bytes": limit})
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise too_large
        parts, size, kept, more = list[bytes](), 0, False, True
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    size += len(chunk)
                    self._hold(len(chunk))
                    if size > limit:
                        raise too_large
                    if chunk:
                        self._require_memory()
                    parts.append(chunk)
            if len(parts) > 1:
                async with self._joining:  # one large body at a time; other requests run in between
                    await asyncio.sleep(0)
                    parts = [b"".join(parts)]
            kept = True
            return parts[0]
        except TimeoutError:
            seconds = self._settings.body_seconds
            raise Refusal(408, f"the body did not come within {seconds:g} s", allowed="all of it") from None
        finally:
            if not kept:
                self._hold(-size)


class _GoneError(Exception):
    """The client closed the connection."""


class _Sender:
    """Sends an answer with the headers in `HEADERS` and `added`; `hold(n)` adds n bytes to the memory in use."""

    def __init__(self, send: Send, hold: Callable[[int], None], added: Mapping[str, str]) -> None:
        self._send, self._hold, self.added = send, hold, added
        self.status, self.begun, self.ended, self.sent = 499, False, False, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", [])))
            for name, value in {**HEADERS, **self.added}.items():
                headers.setdefault(name, value)
            await self._send({**message, "headers": headers.raw})
        else:
            await self._body(message.get("body", b""), message.get("more_body", False))

    async def _body(self, body: bytes, more: bool) -> None:
        self._hold(len(body))
        self.sent += len(body)
        try:
            for start in range(0, len(body) or 1, _PIECE):
                self.ended = not more and start + _PIECE >= len(body)
                piece = body[start : start + _PIECE]
                await self._send({"type": "http.response.body", "body": piece, "more_body": not self.ended})
        finally:
            self._hold(-len(body))

    async def refuse(self, error: Refusal) -> None:
        """Send an error without its end, so the client can read it before `end` closes the connection."""
        if self.begun:
            return
        answer = answer_to(error)
        answer.headers["Connection"] = "close"
        await self({"type": "http.response.start", "status": error.status, "headers": answer.raw_headers})
        await self({"type": "http.response.body", "body": bytes(answer.body), "more_body": True})

    async def end(self) -> None:
        if not self.ended:
            await self({"type": "http.response.body", "body": b"", "more_body": False})


def _in_origin_form(scope: Scope) -> Scope:
    """The scope, with a URL in the form for proxies (RFC 9112, section 3.2.2) split into path and `Host`."""
    if (address := _ADDRESS.fullmatch(scope.get("raw_path", b""))) is None:
        return scope
    host, path = address["host"], address["path"] or b"/"
    headers = [(b"host", host), *(pair for pair in scope["headers"] if pair[0].lower() != b"host")]
    return {**scope, "raw_path": path, "path": unquote(path.decode("latin1")), "headers": headers}


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body already read."""
    read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return read.pop() if read else await receive()

    return replay


async def _linger(receive: Receive, seconds: float) -> None:
    """Read and drop the rest of a body: closing a connection with unread bytes can lose the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive()).get("more_body", False):
                pass


def _cors_headers(origins: Iterable[str], headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Headers of an answer to a page of one of the `origins`; `headers` are the request's, with names in lower case."""
    if not origins:
        return {}
    origin = headers.get(b"origin", b"").decode("latin1")
    allowed = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": f"{HEADER}, Retry-After, ETag"}
    return {"Vary": "Origin", **(allowed if origin in origins else {})}

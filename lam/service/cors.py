"""Pages of other sites that may use the service (CORS)."""

import re
from collections.abc import Iterable, Mapping

from lam.service.tracing import HEADER

_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")
_EXPOSED = f"{HEADER}, Retry-After, ETag"
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, PATCH, DELETE",
    "Access-Control-Allow-Headers": f"Authorization, Content-Type, If-None-Match, X-API-Key, {HEADER}",
    "Access-Control-Max-Age": "600",
}


def check_origin(origin: str) -> None:
    """Raise a `ValueError` for an invalid origin. `*` is invalid, because any page could then use the service."""
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"a CORS origin is like https://example.org or http://localhost:5173, got {origin!r}")


def cors_headers(origins: Iterable[str], headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Headers of an answer to a page of one of the `origins`; `headers` are the request's, with names in lower case."""
    if not origins:
        return {}
    origin = headers.get(b"origin", b"").decode("latin1")
    allowed = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED}
    return {"Vary": "Origin", **(allowed if origin in origins else {})}


def preflight_headers(method: str, headers: Mapping[bytes, bytes], answer: Mapping[str, str]) -> dict[str, str] | None:
    """Headers of the answer to a preflight request, or None for another request; `answer` is from `cors_headers`."""
    asks = method == "OPTIONS" and b"access-control-request-method" in headers
    return _PREFLIGHT if asks and "Access-Control-Allow-Origin" in answer else None

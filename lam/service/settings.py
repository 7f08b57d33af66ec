"""`ServiceSettings`, the limits of the service, its keys and its logs."""

import re
from dataclasses import dataclass, fields

MEBIBYTE = 2**20
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")


@dataclass(frozen=True)
class ServiceSettings:
    """Limits of the service, its keys and its logs. `max_...` are greatest numbers, `..._seconds` times in seconds.

    Attributes:
        max_body: bytes of a body.
        max_json: bytes of a JSON body without its images; 32 more are allowed for each dimension of an embedding.
        max_batch: queries or items of one batch.
        max_batch_json: bytes of a batch without its images.
        max_held: bytes of all bodies and unread answers in memory.
        max_pixels: pixels of an image.
        max_side: pixels of an image's longer side.
        max_decoded: bytes that decoding an image may take.
        max_k: hits of one search.
        max_connections: open connections; fewer if the process may have fewer open files.
        client_connections: open connections from one address; None for `max_connections`.
        header_seconds: until a connection has sent the headers of its next request.
        body_seconds: until a request has sent its body.
        write_seconds: until a client has read an answer, counted from its first pause in reading.
        answer_seconds: for waiting and work at one worker; a slower request is refused.
        linger_seconds: for reading and dropping the rest of a refused body, so that the refusal arrives.
        batch_seconds: how long the service waits for more requests to compute together.
        batch: requests that are computed together.
        patience: greatest wait in all queues together, in seconds; a request that would wait longer is refused.
        queue: waiting requests in one queue.
        keys: file of keys, besides the key in the environment; see `lam.service.keys.Keys.read`.
        access_log: file of all requests, as JSON lines; `-` for standard error.
        slow_seconds: slower requests are marked in the log; without a log, only these are logged, on standard error.
        traces: whether to open spans of OpenTelemetry; see `lam.service.tracing.Spans`.
        cors_origins: origins of pages that may use the service, such as `https://example.org`.
        keep_queries: number of random queries to keep for `lam calibrate --unlabelled live`; None keeps no query.

    Raises:
        ValueError: for a limit that is not positive, or an invalid origin.
    """

    max_body: int = 10 * MEBIBYTE
    max_json: int = 2**16
    max_batch: int = 64
    max_batch_json: int = 4 * MEBIBYTE
    max_held: int = 256 * MEBIBYTE
    max_pixels: int = 25_000_000
    max_side: int = 16_384
    max_decoded: int = 64 * MEBIBYTE
    max_k: int = 100
    max_connections: int = 1000
    client_connections: int | None = 256
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    answer_seconds: float = 30.0
    linger_seconds: float = 2.0
    batch_seconds: float = 0.003
    batch: int = 32
    patience: float = 1.0
    queue: int = 256
    keys: str | None = None
    access_log: str | None = None
    slow_seconds: float | None = None
    traces: bool = False
    cors_origins: tuple[str, ...] = ()
    keep_queries: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value is not False and value <= 0:
                raise ValueError(f"{field.name} must be positive, got {value}")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):  # `*` is invalid: any page could then use the service
                raise ValueError(f"a CORS origin is like https://example.org or http://localhost:5173, got {origin!r}")

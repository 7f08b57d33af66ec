"""The limits that the service holds to, in one record."""

from dataclasses import dataclass, fields

MEBIBYTE = 2**20


@dataclass(frozen=True)
class ServiceSettings:
    """Limits in force.

    Attributes:
        max_body: bytes of one request's body.
        max_json: bytes of a body of JSON, beside 32 for each dimension of an embedding and the images of a pair.
        max_held: bytes of all bodies, and of answers that clients have yet to read, that are held at once.
        max_pixels: of an image.
        max_side: pixels of an image's longer side.
        max_decoded: bytes that decoding an image may take.
        max_k: hits of one search.
        max_connections: that are open at once; fewer where the process may not have so many files open.
        client_connections: of those, how many from one address; None for as many as there may be.
        header_seconds: until a connection must have sent the headers of its next request.
        body_seconds: until a request must have sent its body.
        write_seconds: until an answer must have been read, from when its client first kept it waiting.
        answer_seconds: until a request must be answered once it was read.
        linger_seconds: for how long what still comes of a refused body is thrown away, so that the refusal arrives.
        batch_seconds: for how long a batch waits for more requests.
        batch: requests in one batch.
        patience: seconds of work that a request may have before it, in all queues together; with more it is refused.
        queue: requests that may wait in one queue, whatever they cost.
        keep_queries: how many of the images or texts that are searched for are kept as embeddings, a random sample of
            all, for `lam calibrate --unlabelled live`; None for none.

    Raises:
        ValueError: for a limit that is not positive.
    """

    max_body: int = 10 * MEBIBYTE
    max_json: int = 2**16
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
    keep_queries: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise ValueError(f"{field.name} must be positive, got {value}")

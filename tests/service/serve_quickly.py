"""`lam serve` with limits that a test can wait for: python -m tests.service.serve_quickly RUN."""

import sys

from lam.service.server import serve
from lam.service.settings import ServiceSettings
from tests.models import bag_of_words  # noqa: F401 - which registers itself

HEADERS, BODY, LIMIT = 1.0, 1.5, 1_000_000

if __name__ == "__main__":
    settings = ServiceSettings(header_seconds=HEADERS, body_seconds=BODY, linger_seconds=0.5, max_body=LIMIT)
    serve(sys.argv[1], port=0, settings=settings)

"""Send a request several times at once, from a separate process, and print the answers as JSON.

python -m tests.service.sending PORT METHOD PATH CONTENT_TYPE FILE COUNT
"""

import http.client
import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def sent(port: int, method: str, path: str, kind: str, body: bytes) -> str:
    """The status, or how the connection ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": kind, "X-API-Key": "key"})
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


if __name__ == "__main__":
    port, method, path, kind, file, count = sys.argv[1:]
    body = Path(file).read_bytes()
    with ThreadPoolExecutor(int(count)) as pool:
        found = [pool.submit(sent, int(port), method, path, kind, body) for _ in range(int(count))]
    print(json.dumps(Counter(one.result() for one in found)))

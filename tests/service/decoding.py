"""The cost of reading untrusted images: python -m tests.service.decoding FILE...

For each, a line of JSON: the status, the additional bytes of memory at the peak, and the processor seconds.
"""

import json
import sys
import time
from pathlib import Path

from lam.gallery.refusal import Refusal
from lam.inputs.decoding import thumbnail
from lam.inputs.preprocessing import Preprocessing
from lam.service.embedder import read_image
from lam.service.settings import ServiceSettings

PREPROCESSING = Preprocessing.imagenet()


def status(body: bytes) -> int:
    try:
        image = read_image(body, ServiceSettings(), least=PREPROCESSING.reduced_to)
        PREPROCESSING(image)
        thumbnail(image)
    except Refusal as error:
        return error.status
    return 200


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


if __name__ == "__main__":
    for file in sys.argv[1:]:
        body = Path(file).read_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the peak equals the present use
        before, started = memory("VmRSS"), time.thread_time()
        answered = status(body)
        print(json.dumps([answered, memory("VmHWM") - before, time.thread_time() - started]))

"""Searches per second of one replica and of two, beside the service that writes, over one Milvus Lite server.

    python benchmarks/replicas.py [--turns 3] [--seconds 5]

1,000 items of 128 dimensions; four clients in a loop, all on this machine. results/replicas.json also holds the number
of cores, which clients, server and replicas share.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from service import SMALL_D, asked, make_run, served
from timing import write

ITEMS, CLIENTS, PORT = 1_000, 4, 19531


def searches(ports: list[int], seconds: float) -> float:
    """Searches per second of all clients, which share the ports."""
    with ThreadPoolExecutor(len(ports)) as pool:
        found = list(pool.map(lambda port: asked(port, "vector of 128", CLIENTS // len(ports), seconds), ports))
    return sum(row["served_per_second"] for row in found)


def compare(turns: int, seconds: float) -> dict[str, Any]:
    """One replica and two, in turn."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        run = make_run(Path(folder) / "run", "convnet28", ITEMS, "Flat", SMALL_D)
        options = ["--data-dir", f"{folder}/milvus", "--host", "127.0.0.1", "--port", str(PORT)]
        server = subprocess.Popen(
            [sys.executable, "-m", "milvus_lite", "server", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        running.callback(server.kill)
        time.sleep(5)
        index = ("--index", f"milvus://127.0.0.1:{PORT}/items")
        running.enter_context(served(run, *index))
        ports = [running.enter_context(served(run, *index, "--replica"))[0] for _ in range(2)]
        searches(ports, 1)
        taken = [(searches(ports[:1], seconds), searches(ports, seconds)) for _ in range(turns)]
    ratios = [two / one for one, two in taken]
    return {
        "items": ITEMS,
        "clients": CLIENTS,
        "cores": os.cpu_count(),
        "one": median(one for one, _ in taken),
        "two": median(two for _, two in taken),
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parsed = parser.parse_args()
    write("replicas", compare(parsed.turns, parsed.seconds))


if __name__ == "__main__":
    sys.exit(main())

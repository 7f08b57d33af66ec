"""Shared by the benchmarks: repeated timing, peak memory of a call, and results as JSON."""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
APART = "_gpu" if DEVICE == "cuda" else ""
"""The end of the names of results that are measured on a GPU, if there is one."""


def seconds(call: Callable[[], Any], *, repeats: int = 5, warmup: int = 1, least: float = 0.05) -> float:
    """Median seconds of a call; short calls are run in a loop of at least `least` seconds."""
    for _ in range(warmup):
        call()
    synchronise()
    start = time.perf_counter()
    call()
    synchronise()
    loops = max(1, int(least / max(time.perf_counter() - start, 1e-9)))
    measured = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(loops):
            call()
        synchronise()
        measured.append((time.perf_counter() - start) / loops)
    return sorted(measured)[len(measured) // 2]


def synchronise() -> None:
    """Wait for unfinished work of a GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_bytes(call: Callable[[], Any]) -> int:
    """Additional memory at the peak of a call, in bytes: of the GPU if there is one, else of the process."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        synchronise()
        return torch.cuda.max_memory_allocated() - before
    before = _resident()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(peak, _resident()) - before


def machine() -> dict[str, Any]:
    """The machine of the measurements."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return {
        "processor": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "load": Path("/proc/loadavg").read_text().split()[0] if Path("/proc/loadavg").is_file() else None,
    }


def kept(name: str) -> dict[str, Any]:
    """The contents of results/NAME.json from earlier calls, without their machine; empty without the file."""
    file = RESULTS / f"{name}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return {key: value for key, value in results.items() if key != "machine"}


def write(name: str, results: dict[str, Any]) -> None:
    """Write results/NAME.json and print it."""
    text = json.dumps({"machine": machine(), **results}, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)


def in_process(script: str, *arguments: str, **environment: str) -> Any:
    """Run a benchmark's script in a separate process, and read the JSON in its last line."""
    command = [sys.executable, script, *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment).stdout
    return json.loads(output.splitlines()[-1])


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

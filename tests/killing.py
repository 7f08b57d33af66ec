"""Kill a process again and again, start it again each time, and compare its end with an uninterrupted one's."""

import multiprocessing
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def kill_again_and_again(
    work: Callable[[Path], None], outcome: Callable[[Path], Any], folder: Path, kills: int, seed: int
) -> None:
    """Print the number of kills after which the work in a folder still had the same outcome.

    Each start is a process of its own, forked from this one, which has imported everything but started no thread.

    Raises:
        SystemExit: if the work does not start again, or ends otherwise.
    """
    torch.set_num_threads(1)
    context, rng, done = multiprocessing.get_context("fork"), random.Random(seed), 0

    def start(place: Path) -> Any:
        process = context.Process(target=work, args=(place,))
        process.start()
        return process

    begin = time.monotonic()
    start(folder / "whole").join()
    duration = time.monotonic() - begin
    expected, killed = outcome(folder / "whole"), folder / "killed"
    while True:
        process = start(killed)
        process.join(rng.uniform(0, duration) if done < kills else None)
        if process.is_alive():
            process.kill()
            process.join()
            done += 1
            continue
        if process.exitcode != 0:
            raise SystemExit(f"after {done} kills the work did not start again")
        if outcome(killed) != expected:
            raise SystemExit(f"after {done} kills the work ended otherwise")
        if done == kills:
            break
        shutil.rmtree(killed)
    print(f"{done} kills, same end")

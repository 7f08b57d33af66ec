"""Kill a training run again and again, start it again each time, and compare its end with an uninterrupted run's.

Called as `python kill_training.py FOLDER KILLS SEED`. Every run is a process of its own, forked from this one, which
has torch imported but no thread started.
"""

import json
import multiprocessing
import random
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from lam import losses, models
from lam.models.network import EmbeddingNetwork
from lam.training import Training, train
from lam.utils.files import write_tensors


def network() -> EmbeddingNetwork:
    convnet = models.build("convnet8", dimension=3)
    convnet.features.append(nn.BatchNorm1d(512))
    convnet.features.append(nn.Dropout(0.2))
    return convnet


def run(folder: Path, result: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(48) % 3
    images = torch.rand(48, 1, 8, 8, generator=generator) + labels[:, None, None, None] / 3
    trained = network()
    history = train(
        trained,
        list(zip(images, labels.tolist(), strict=True)),
        Training(
            loss=losses.build(margin=0.7),
            epochs=4,
            validate=lambda n: -float(n.head.weight.square().sum()),
            batch_size=12,
            folder=folder,
            checkpoint_every=1,
            accelerator="cpu",
            progress=False,
        ),
    )
    record = {name: value for name, value in asdict(history).items() if name != "seconds"}
    of_text = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
    write_tensors(result, {**trained.state_dict(), "history": of_text})


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    context, rng, done = multiprocessing.get_context("fork"), random.Random(seed), 0

    def start(name: str) -> multiprocessing.Process:
        process = context.Process(target=run, args=(folder / name, folder / f"{name}.safetensors"))
        process.start()
        return process

    begin = time.monotonic()
    start("whole").join()
    duration = time.monotonic() - begin
    expected = (folder / "whole.safetensors").read_bytes()
    while done < kills:
        process = start("killed")
        process.join(rng.uniform(0, duration))
        if process.is_alive():
            process.kill()
            done += 1
        process.join()
        if done == kills:
            start("killed").join()
        if (folder / "killed.safetensors").exists():
            if (folder / "killed.safetensors").read_bytes() != expected:
                raise SystemExit(f"after {done} kills the weights or the history differ")
            (folder / "killed.safetensors").unlink()
            shutil.rmtree(folder / "killed")
        elif done == kills:
            raise SystemExit("the last run did not finish")
    print(f"{done} kills, same end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

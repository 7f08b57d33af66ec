"""Kill a training again and again: `python -m tests.training.kill_training FOLDER KILLS SEED`, see `tests.killing`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from lam import losses, models
from lam.models.networks import EmbeddingNetwork
from lam.training import Training, train
from lam.utils.files import write_tensors
from tests.killing import kill_again_and_again

RESULT = "result.safetensors"


def network() -> EmbeddingNetwork:
    convnet = models.build("convnet8", dimension=3)
    convnet.features.append(nn.BatchNorm1d(512))
    convnet.features.append(nn.Dropout(0.2))
    return convnet


def run(folder: Path) -> None:
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
    write_tensors(folder / RESULT, {**trained.state_dict(), "history": of_text})


def outcome(folder: Path) -> bytes:
    return (folder / RESULT).read_bytes()


if __name__ == "__main__":
    kill_again_and_again(run, outcome, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

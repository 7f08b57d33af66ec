"""Whether a teacher keeps features that training on a few classes loses.

    python benchmarks/teacher.py --data FOLDER [--cache build/real] [--draws 3] [--only DATA ...]

A small network is trained on the known classes of a data set, twice: by SupCon alone, and with a second linear head
that predicts the features of a general, frozen network for the same input, without the subspace of the class means.
This head is then dropped. Both networks have the same first weights and batches. Strangers are the classes of
`real.py`; the teachers' features are in CACHE, where `real.py features` writes them. The result goes to
results/teacher.json.
Source: “domain-sensitivity collapse”, arXiv 2603.11269.
"""

import argparse
import os
import time
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from PIL import Image
from real_data import Places, load
from real_scores import Cell, Draw, draw, parted
from safetensors import safe_open
from timing import kept, write
from torch import Tensor, nn

from lam.losses import SupCon
from lam.pairs.pairs import Pairs
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.reference import Reference, relative_mahalanobis

TEACHERS = {
    "cifar10": "efficientnet_lite0",
    "omniglot": "efficientnet_lite0",
    "stamps": "efficientnet_lite0",
    "faces": "efficientnet_lite0",
    "clinc150": "minilm",
    "banking77": "minilm",
}
WEIGHT, STEPS, BATCH, SIDE, WIDTH, DIMENSION, COMPONENTS, WORDS = 1.0, 800, 128, 32, 256, 64, 64, 2**14


@dataclass(frozen=True)
class Inputs:
    """N inputs of a student: images (N, 3, SIDE, SIDE), or numbers of words (N, W) with zeros at the end."""

    values: Tensor
    labels: Int64[Tensor, " N"]

    @property
    def student(self) -> nn.Module:
        """A new network from inputs to WIDTH features."""
        if not self.values.is_floating_point():
            words = nn.EmbeddingBag(WORDS, WIDTH, padding_idx=0)
            return nn.Sequential(words, nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128), (128, WIDTH)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def inputs_of(data: str, places: Places) -> Inputs:
    """The inputs of a data set."""
    items = load(data, places)
    if isinstance(items.items[0], str):
        numbers = [torch.tensor(_numbers(str(text))) for text in items.items]
        return Inputs(nn.utils.rnn.pad_sequence(numbers, batch_first=True), items.labels)
    small = [image.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for image in items.items]  # type: ignore[union-attr]
    return Inputs(
        torch.from_numpy(np.stack([np.asarray(image) for image in small])).permute(0, 3, 1, 2) / 255, items.labels
    )


def _numbers(text: str) -> list[int]:
    """Numbers of the words and of the pairs of words of a text, from 1."""
    words = text.lower().split()
    parts = words + [" ".join(pair) for pair in pairwise(words)]
    return [1 + zlib.crc32(part.encode()) % (WORDS - 1) for part in parts]


def beside_classes(teacher: Float[Tensor, "N P"], labels: Int64[Tensor, " N"]) -> Float[Tensor, "N C"]:
    """The first principal components of features orthogonal to the class means, each with variance 1."""
    centred = (teacher - teacher.mean(0)) / teacher.std(0).clamp_min(1e-6)
    means = torch.stack([centred[labels == one].mean(0) for one in labels.unique()])
    basis = torch.linalg.svd(means - means.mean(0), full_matrices=False).Vh[: len(means) - 1]
    rest = centred - centred @ basis.T @ basis
    _, lengths, axes = torch.linalg.svd(rest - rest.mean(0), full_matrices=False)
    axes = axes[lengths > 1e-3 * lengths[0]][:COMPONENTS]  # beyond these there is only rounding
    parts = (rest - rest.mean(0)) @ axes.T
    return parts / parts.std(0)


def trained(
    inputs: Inputs, rows: Int64[Tensor, " N"], target: Float[Tensor, "N C"] | None, seed: int
) -> tuple[Tensor, nn.Linear]:
    """Features of all inputs, and the head, of a network that is trained on some rows."""
    torch.manual_seed(seed)
    student, head = inputs.student, nn.Linear(WIDTH, DIMENSION)
    second = nn.Linear(WIDTH, COMPONENTS if target is None else target.shape[1])
    loss = SupCon(temperature=0.1)
    parameters = [*student.parameters(), *head.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    for _ in range(STEPS):
        batch = torch.randperm(len(rows))[:BATCH]
        pairs = Pairs.by_label(inputs.labels[rows[batch]])
        features = student(_augmented(inputs.values[rows[batch]]))
        value = loss(F.normalize(head(features)), pairs)
        if target is not None:
            value = value + WEIGHT * F.mse_loss(second(features), target[batch])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    student.eval()
    with torch.inference_mode():
        return torch.cat([student(part) for part in inputs.values.split(512)]).clone(), head


def _augmented(values: Tensor) -> Tensor:
    """Images moved by up to 3 pixels; words of texts left out at random."""
    if not values.is_floating_point():
        return values * (torch.rand(values.shape) > 0.1)
    down, right = torch.randint(-3, 4, (2,)).tolist()
    return values.roll((down, right), (2, 3))


def scores_of(parts: Draw) -> dict[str, float]:
    """Recall@1, and AUROC of strangers by κ, the cosine of the first hit and the relative Mahalanobis distance."""
    gallery = parts.gallery
    reference = Reference.of(gallery.features, gallery.labels)
    known, strange = parts.test, parts.strange
    cosines = [part.embeddings.mean @ gallery.embeddings.mean.T for part in (known, strange)]
    distances = [relative_mahalanobis(part.features, reference) for part in (known, strange)]
    return {
        "recall@1": float((gallery.labels[cosines[0].argmax(1)] == known.labels).double().mean()),
        "kappa": auroc(-known.embeddings.kappa, -strange.embeddings.kappa),
        "cosine": auroc(*(-cosine.amax(1) for cosine in cosines)),
        "relative_mahalanobis": auroc(*distances),
    }


def measured(inputs: Inputs, tensors: dict[str, Tensor], data: str, seed: int) -> dict[str, Any]:
    """AUROC of strangers by several scores, without and with the teacher."""
    rows = parted(tensors, inputs.labels, data, seed)
    asked = torch.cat([rows["calibration"], rows["test"]])
    is_known = torch.isin(inputs.labels, inputs.labels[rows["gallery"]])
    is_known[asked] = False
    training = is_known.nonzero().flatten()
    target = beside_classes(tensors["features"][training].float(), inputs.labels[training])
    found: dict[str, Any] = {"items": len(training)}
    for name, wanted in (("alone", None), ("teacher", target)):
        features, head = trained(inputs, training, wanted, seed)
        assert head.bias is not None
        cell = Cell(rows, features, inputs.labels, head.weight.detach(), head.bias.detach())
        found[name] = scores_of(draw(cell))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LAM_DATA", "data")))
    parser.add_argument("--cache", type=Path, default=Path("build/real"), help="where features are kept")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=TEACHERS, default=list(TEACHERS))
    parsed = parser.parse_args()
    found: dict[str, Any] = kept("teacher").get("data", {})
    for data in parsed.only:
        with safe_open(parsed.cache / f"{TEACHERS[data]}__{data}.safetensors", "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys() if name != "previous"}  # noqa: SIM118
        inputs = inputs_of(data, Places(parsed.data, parsed.cache))
        if not torch.equal(inputs.labels, tensors["labels"]):
            raise SystemExit(f"{data}: the features are of other items; remove them and run `real.py features`")
        found[data] = []
        for seed in range(parsed.draws):
            started = time.perf_counter()
            found[data].append(measured(inputs, tensors, data, seed))
            print(data, seed, found[data][-1], f"{time.perf_counter() - started:.0f} s", flush=True)
            write("teacher", {"weight": WEIGHT, "steps": STEPS, "data": found})


if __name__ == "__main__":
    main()

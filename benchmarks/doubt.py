"""κ of ambiguity and its rivals, compared with the doubt of five other networks.

    python benchmarks/doubt.py --data FOLDER [--cache build/real] [--only NETWORK__DATA ...] [--draws 3]

Labels by many people, such as CIFAR-10H's, are not available. Instead, five small networks learn the classes from
pixels or words, without lam and without the pretrained network, each with its own seed and width. Doubt is the entropy
of their mean class probabilities, on test items that no network trained on. lam embeds the same items by the features
of `real.py features`. All classes are known; a fifth of the items, at most 1,000, are test queries, and half as many
are calibration queries. The figure of each score is the rank correlation of doubt with minus the score. Results go to
results/doubt.json; results of other calls stay in the file.
"""

import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from ambiguity import certainties, measure_cells
from PIL import Image
from real_data import Places, load
from real_scores import Cell, ambiguity_of, mean_of, read, trained_head, tuned
from torch import Tensor, nn

from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.uncertainty import rank_correlation

CELLS = [*(("efficientnet_lite0", data) for data in ("cifar10", "clothes", "digits")), ("minilm", "banking77")]
WIDTHS, BATCH, STEPS = (24, 32, 40, 48, 64), 128, 600
SIDE, CROP, WORDS, MOST = 32, 2, 1 << 14, 1000


def block(n_in: int, n_out: int) -> nn.Sequential:
    """A convolution whose output has half the side."""
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(), nn.MaxPool2d(2))


def network(width: int, n_classes: int, *, of_images: bool) -> nn.Sequential:
    """A small network from pixels, or from indices of words, to logits."""
    if of_images:
        layers = [block(3, width), block(width, 2 * width), block(2 * width, 4 * width), nn.AdaptiveAvgPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(16 * width, n_classes))
    words = nn.EmbeddingBag(WORDS, 4 * width, padding_idx=0)
    return nn.Sequential(words, nn.ReLU(), nn.Dropout(0.3), nn.Linear(4 * width, n_classes))


def pixels(images: list[Image.Image]) -> Tensor:
    """(N, 3, 32, 32) standardised pixels."""
    values = torch.tensor(np.stack([np.asarray(image.convert("RGB").resize((SIDE, SIDE))) for image in images]))
    values = values.permute(0, 3, 1, 2).float()
    return (values - values.mean((0, 2, 3), keepdim=True)) / values.std((0, 2, 3), keepdim=True)


def words(texts: list[str]) -> Tensor:
    """(N, T) indices of words and pairs of words, by their hash; 0 fills the rows."""
    rows = []
    for text in texts:
        split = text.lower().split()
        tokens = [*split, *map(" ".join, pairwise(split))]
        rows.append(torch.tensor([1 + zlib.crc32(token.encode()) % (WORDS - 1) for token in tokens]))
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def probabilities(x: Tensor, y: Tensor, trained: Tensor, asked: Tensor, width: int, seed: int) -> Tensor:
    """Probabilities of the classes of the rows `asked`, by one network trained on the rows `trained`."""
    torch.manual_seed(seed)
    of_images = x.dim() == 4
    net = network(width, int(y.max()) + 1, of_images=of_images)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for _ in range(STEPS):
        rows = trained[torch.randint(len(trained), (BATCH,))]
        batch = x[rows]
        if of_images:
            top, left = torch.randint(0, 2 * CROP + 1, (2,)).tolist()
            batch = F.pad(batch, (CROP,) * 4, mode="reflect")[:, :, top : top + SIDE, left : left + SIDE]
        optimizer.zero_grad()
        F.cross_entropy(net(batch), y[rows]).backward()
        optimizer.step()
        schedule.step()
    net.eval()
    with torch.no_grad():
        return torch.cat([net(one).softmax(1) for one in x[asked].split(256)]).double()


def measure(places: Places, file: Path, _: str, data: str, seed: int) -> dict[str, Any]:
    """All figures of one draw."""
    tensors, items = read(file), load(data, places)
    features, y = tensors["features"].float(), tensors["labels"].long()
    assert torch.equal(y, items.labels)
    known = (items.labels >= 0).nonzero().flatten()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{data} {seed}".encode()))
    known = known[torch.randperm(len(known), generator=generator)]
    n = min(MOST, len(known) // 5)
    rows = {"test": known[:n], "calibration": known[n : n + n // 2], "gallery": known[n + n // 2 :]}
    gallery = rows["gallery"]
    cell = Cell(rows, features, y, *trained_head(features[gallery], y[gallery], seed))
    x = words(items.items) if isinstance(items.items[0], str) else pixels(items.items)  # pyright: ignore[reportArgumentType]
    each = [probabilities(x, y, known[n:], known[:n], width, 10 * seed + i) for i, width in enumerate(WIDTHS)]
    mean = torch.stack(each).mean(0)
    doubt = torch.special.entr(mean).sum(1)
    posterior, reference = tuned(cell, cell.posterior()).posterior, Reference.of(*cell.of("gallery"))
    test, labels = cell.of("test")
    scores = certainties(cell, posterior, ambiguity_of(cell), reference, test)
    first = y[gallery][rank(mean_of(cell, test), mean_of(cell, cell.of("gallery")[0]), k=1)[0][:, 0]]
    return {
        "recall@1": float((first == labels).double().mean()),
        "accuracy of the networks": float((mean.argmax(1) == labels).double().mean()),
        "correlations": {name: rank_correlation(doubt, -values.double()) for name, values in scores.items()},
    }


if __name__ == "__main__":
    measure_cells(__doc__, "doubt", CELLS, measure)

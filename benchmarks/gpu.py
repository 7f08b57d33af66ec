"""Work for a GPU: the curvature of all layers of a ResNet-50, and exact search of a million embeddings.

    python benchmarks/gpu.py

results/gpu.json holds seconds and the GPU's memory. FAISS searches on the GPU and on all cores, in turn in one run,
with the same results.
"""

import sys
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timing import peak_bytes, seconds, write

import lam
from lam import models
from lam.retrieval import Index
from lam.vmf.embeddings import Embeddings

LAYERS = ((64, 64, 16), (64, 224, 16), (128, 224, 8))  # D, pixels on a side, images
ITEMS, QUERIES, D, HITS = 1_000_000, 1000, 128, 10


def all_layers(dimension: int, size: int, n_images: int) -> dict[str, float]:
    """`fit` over every layer: the diagonal of all 24 million weights."""
    network = models.build("resnet50", dimension=dimension).eval().cuda()
    labels = torch.arange(n_images // 2) % 4
    batches = [(torch.rand(n_images // 2, 3, size, size), labels) for _ in range(2)]
    options = lam.Laplace(margin=2.0, layers="all", max_memory=32 << 30)
    encoder: Any = None
    found: dict[str, float] = {}

    def fitted() -> None:
        nonlocal encoder
        encoder = lam.fit(network, batches, options, progress=False)

    fitted()
    start = time.perf_counter()
    found["peak_gibibytes"] = peak_bytes(fitted) / 2**30
    found["seconds"] = time.perf_counter() - start
    inputs = batches[0][0][:8]
    found["embed_seconds_an_image"] = seconds(lambda: encoder.embed(inputs), repeats=3) / len(inputs)
    n_weights = sum(parameter.numel() for parameter in network.parameters())
    return {"D": dimension, "pixels": size, "images": n_images, "weights": n_weights, **found}


def search() -> dict[str, object]:
    """The ten nearest of a million, for a thousand queries at once and one alone."""
    random: dict[str, Any] = {"generator": torch.Generator("cuda").manual_seed(0), "device": "cuda"}
    stored, queries = (F.normalize(torch.randn(n, D, **random)).cpu() for n in (ITEMS, QUERIES))
    found: dict[str, object] = {"items": ITEMS, "D": D, "hits": HITS, "queries": QUERIES}
    ids = []
    for device in ("cpu", "cuda"):
        index = Index(D, device=device)
        index.add(Embeddings(stored, torch.ones(ITEMS), torch.ones(ITEMS), torch.ones(ITEMS)), range(ITEMS))
        many, one = (Embeddings(queries[:n], torch.ones(n), torch.ones(n), torch.ones(n)) for n in (QUERIES, 1))
        ids.append(index.search(many, HITS).ids)
        for name, query in (("queries", many), ("one", one)):
            found[f"seconds_{name}_{device}"] = seconds(partial(index.search, query, HITS))
    found["share_of_equal_hits"] = float((torch.as_tensor(ids[0]) == torch.as_tensor(ids[1])).double().mean())
    return found


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    results: dict[str, object] = {"search": search()}
    write("gpu", results)
    results["all_layers"] = [all_layers(*case) for case in LAYERS]
    write("gpu", results)


if __name__ == "__main__":
    sys.exit(main())

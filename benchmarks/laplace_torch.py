"""The last layer of laplace-torch and of lam: processor time of a fit and of the covariances of outputs, as ratios.

    python benchmarks/laplace_torch.py --inputs 512 --dimension 3 [--items 1500] [--queries 256] [--double]

Both have the same random features, and a layer with the same weights. laplace-torch has no loss over pairs, so its
likelihood is a regression. Both take turns on one thread, and the least time of each counts. lam decomposes its factors
in float64 for any features; with `--double`, features and weights are float64, so laplace-torch does so, too.
laplace-torch must be importable. results/laplace_torch.json has a row for each size and type; another call replaces
only its own rows.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import kept, write
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lam

BATCH = 256
REPEATS = 5


def measured(theirs: Callable[[], Any], ours: Callable[[], Any]) -> dict[str, float]:
    """Seconds of both, and the speed-up of lam."""
    least = {"laplace_torch": float("inf"), "lam": float("inf")}
    for _ in range(REPEATS):
        for name, call in zip(least, (theirs, ours), strict=True):
            start = time.process_time()
            call()
            least[name] = min(least[name], time.process_time() - start)
    return {**least, "times_faster": least["laplace_torch"] / least["lam"]}


def compared(structure: str, layer: nn.Linear, features: torch.Tensor, labels: torch.Tensor, n_queries: int) -> Any:
    """Fit and covariances of the outputs of some queries, by a structure of both libraries."""
    from laplace import Laplace  # pyright: ignore[reportMissingImports]

    network = nn.Sequential(nn.Identity(), layer)
    outputs = features.new_zeros(len(features), layer.out_features)
    rival: Any = Laplace(network, "regression", subset_of_weights="last_layer", hessian_structure=structure)
    rival.fit(DataLoader(TensorDataset(features, outputs), batch_size=BATCH))  # which also finds the layer
    theirs = DataLoader(TensorDataset(features, outputs), batch_size=BATCH)
    batches = DataLoader(TensorDataset(features, labels), batch_size=BATCH)

    def fit() -> Any:
        posterior = lam.fit(network, batches, lam.Laplace(margin=0.7, structure=structure), progress=False).posterior
        return posterior.output_spread()  # with what a first prediction finds

    spread, queries = fit(), features[:n_queries]
    return {
        "fit": measured(lambda: rival.fit(theirs), fit),
        "covariance": measured(lambda: rival._glm_predictive_distribution(queries), lambda: spread(queries).covariance),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--dimension", type=int, default=3)
    parser.add_argument("--items", type=int, default=1500)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--double", action="store_true", help="features and weights in float64")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    dtype = torch.float64 if parsed.double else torch.float32
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(parsed.items) % 10
    features = torch.randn(10, parsed.inputs, generator=generator)[labels]
    features = (features + torch.randn(parsed.items, parsed.inputs, generator=generator)).relu().to(dtype)
    torch.manual_seed(0)
    layer = nn.Linear(parsed.inputs, parsed.dimension, dtype=dtype)
    results = kept("laplace_torch")
    arguments = layer, features, labels, parsed.queries
    results[f"P = {parsed.inputs}, D = {parsed.dimension}" + ", float64" * parsed.double] = {
        "n_items": parsed.items,
        "n_queries": parsed.queries,
        **{structure: compared(structure, *arguments) for structure in ("diag", "kron")},
    }
    write("laplace_torch", results)


if __name__ == "__main__":
    sys.exit(main())

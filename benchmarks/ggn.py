"""Curvature over all pairs: time, compared with one pair at a time and with BackPACK; memory; and a whole data set.

    python benchmarks/ggn.py [--quick] [--infonce [--published FILE]] [--matmuls] [--curvlinops]

All measurements come from one run, and results/ggn.json holds seconds and ratios; on a GPU, ggn_gpu.json also has a
million items. The other options measure CPU time of one thread:

- `--infonce`: only InfoNCE with one side fixed, compared with a (D, D) matrix for every item, as written here, or with
  `--published`, as in a copy of `bayesvlm/hessians.py` of AaltoML/BayesVLM; results/infonce.json
- `--matmuls`: `fixed`, compared with its own matmuls; results/ggn_matmuls.json
- `--curvlinops`: curvlinops' estimates of the diagonal in the time of lam and in multiples of it, with their errors;
  results/curvlinops.json. curvlinops must be importable.
"""

import argparse
import json
import math
import os
import runpy
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timing import APART, DEVICE, in_process, peak_bytes, seconds, synchronise, write
from torch import Tensor, nn

from lam.hessians import (
    ContrastiveCurvature,
    Diagonal,
    SupConCurvature,
    diagonal_ggn,
    ggn_of_dataset,
    output_curvature,
)
from lam.hessians.losses.contrastive import FIXES, SPLITS, arccos, cross_curvature
from lam.pairs.candidates import Candidates
from lam.pairs.pairs import Pairs

SHAPES = [(64, 3, 9216), (64, 512, 2048), (256, 128, 2048)]
MEMORY_SHAPE = (512, 512, 2048)
TEMPERATURE = 0.05
BUDGETS = {"fixed": (1, 10, 100), "full": (1,)}
"""Times for the estimates of a diagonal, in multiples of lam's time."""
DRAWS = 3
"""Number of estimates in the mean error."""


def contrastive_ggn(features: Any, weight: Any, bias: Any, pairs: Any, **settings: Any) -> Diagonal:
    return diagonal_ggn(features, weight, bias, pairs, ContrastiveCurvature(**settings))


def contrastive_ggn_dataset(features: Tensor, weight: Tensor, labels: Tensor, margin: float) -> Diagonal:
    empty = Diagonal.zeros(weight, ContrastiveCurvature(margin), has_bias=False)
    return ggn_of_dataset(empty, features, weight, None, labels, progress=False)


def layer(N: int, D: int, P: int, classes: int = 8) -> tuple[Tensor, Tensor, Tensor, Pairs]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(N) % classes
    features = torch.randn(classes, P, generator=generator)[labels] + torch.randn(N, P, generator=generator)
    features = features.relu()
    weight = torch.randn(D, P, generator=generator) / P**0.5
    return features.to(DEVICE), weight.to(DEVICE), torch.zeros(D, device=DEVICE), Pairs.by_label(labels.to(DEVICE))


def pair_by_pair(features: Tensor, weight: Tensor, bias: Tensor, pairs: list[tuple[int, int]], cross: bool) -> Tensor:
    """A simple loop: the closed form of `arccos`, one pair at a time."""
    f = F.linear(features, weight, bias)
    r = f.norm(dim=1, keepdim=True)
    n = f / r
    total = torch.zeros_like(weight)
    for a, b in pairs:
        first, second = slice(a, a + 1), slice(b, b + 1)
        H11 = arccos(n[first], n[second] / r[first].square()).diagonal()
        H22 = arccos(n[second], n[first] / r[second].square()).diagonal()
        total += H11.T @ features[first].square() + H22.T @ features[second].square()
        if cross:
            H12 = cross_curvature(n[first], r[first], n[second], r[second])
            total += 2 * H12.T @ (features[first] * features[second])
    return total


def backpack_seconds(features: Tensor, weight: Tensor, repeats: int) -> float:
    """Seconds of BackPACK's DiagGGNExact for the same layer, with a surrogate loss of one quadratic term per item.

    The sum of ‖f‖² over items has the curvature 2 Σ_a φ_aj²: the same shapes and the same kind of sum, without pairs,
    normalisation or margin, which BackPACK cannot express. The result is checked before it is timed.
    """
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact

    linear: Any = extend(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    linear = linear.to(weight.device)
    linear.weight.data.copy_(weight)
    loss: Any = extend(nn.MSELoss(reduction="sum"))
    target = features.new_zeros(len(features), len(weight))

    def call() -> None:
        with backpack(DiagGGNExact()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of hooks on inputs that need no gradient
            loss(linear(features), target).backward()

    call()
    expected = (2 * features.square().sum(0)).expand_as(linear.weight)
    torch.testing.assert_close(linear.weight.diag_ggn_exact, expected, rtol=1e-4, atol=1e-4)
    return seconds(call, repeats=repeats)


def against_others(shape: tuple[int, int, int], repeats: int) -> dict[str, object]:
    """All ordered pairs at once, against one pair at a time and against BackPACK."""
    N, D, P = shape
    features, weight, bias, pairs = layer(*shape)
    ordered = N * (N - 1)
    times = {
        f"{split} {fix}": seconds(
            lambda split=split, fix=fix: contrastive_ggn(
                features, weight, bias, pairs, margin=2.0, split=split, fix=fix
            ),
            repeats=repeats,
        )
        for split in SPLITS
        for fix in FIXES
    }
    some = [(a, b) for a in range(N) for b in range(N) if a != b][:300]
    slow = {
        name: seconds(lambda cross=cross: pair_by_pair(features, weight, bias, some, cross), repeats=1, least=0) / 300
        for name, cross in (("arccos fixed", False), ("arccos full", True))
    }
    backpack = backpack_seconds(features, weight, repeats)
    return {
        "N": N,
        "D": D,
        "P": P,
        "ordered_pairs": ordered,
        "milliseconds": {name: 1e3 * value for name, value in times.items()},
        "one_pair_at_a_time_milliseconds_for_300": {name: 300e3 * value for name, value in slow.items()},
        "ratio_one_pair_at_a_time": {name: value * ordered / times[name] for name, value in slow.items()},
        "backpack_milliseconds": 1e3 * backpack,
        "ratio_backpack": backpack / times["arccos fixed"],
        "ratio_full_to_fixed": times["arccos full"] / times["arccos fixed"],
    }


def thread_seconds(call: Callable[[], Any]) -> float:
    """CPU time of one call in this thread."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


class HeldStill(nn.Module):
    """−Σ_a n_a · m_a, with the sums m_a over an item's partners as targets: `fixed`, item by item."""

    reduction = "sum"

    def forward(self, f: Tensor, m: Tensor) -> Tensor:
        return -(F.normalize(f) * m).sum()


class OfPairs(nn.Module):
    """−Σ_ab t_ab n_a · n_b, with the weights t of all pairs of a batch as targets: `full`, for the whole batch."""

    reduction = "sum"

    def forward(self, f: Tensor, t: Tensor) -> Tensor:
        n = F.normalize(f)
        return -((t @ n) * n).sum()


def linear_operator(features: Tensor, weight: Tensor, pairs: Pairs, fix: str) -> Any:
    """curvlinops' GGN for the same pairs, with the split `arccos` and a margin of 2."""
    from curvlinops import GGNLinearOperator  # pyright: ignore[reportMissingImports]

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    t = pairs.positive.to(weight) / pairs.n_positives - pairs.negative.to(weight) / pairs.n_negatives
    targets = t if fix == "full" else 2 * t @ F.normalize(features @ weight.T)
    loss = OfPairs() if fix == "full" else HeldStill()
    data = [(features, targets)]
    return GGNLinearOperator(linear, loss, list(linear.parameters()), data, check_deterministic=False)


def estimated(shape: tuple[int, int, int], fix: str) -> dict[str, object]:
    """Estimates of a diagonal by products with more and more random vectors, compared with the exact diagonal.

    Each estimate gets lam's time, and multiples of it. The number of vectors is the greatest power of two that fits
    (XDiag: at least two). Times are the least CPU times of one thread, without the construction of the operator.
    """
    from curvlinops import hutchinson_diag, xdiag  # pyright: ignore[reportMissingImports]

    def exact(features: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        return contrastive_ggn(features, weight, None, pairs, margin=2.0, fix=fix).h

    features, weight, _, pairs = layer(8, 3, 10, classes=3)
    small = features.double(), weight.double(), pairs
    columns = linear_operator(*small, fix) @ torch.eye(weight.numel(), dtype=torch.float64)
    torch.testing.assert_close(columns.diagonal().view_as(weight), exact(*small), rtol=1e-9, atol=1e-12)

    features, weight, _, pairs = layer(*shape)
    expected, operator = exact(features, weight, pairs).flatten(), linear_operator(features, weight, pairs, fix)
    own = min(thread_seconds(lambda: exact(features, weight, pairs)) for _ in range(30))
    largest, rows = own * max(BUDGETS[fix]), []
    for name, estimate, start in (("hutchinson", hutchinson_diag, 1), ("xdiag", xdiag, 2)):
        taken, n_vectors = 0.0, start
        while taken <= largest:
            call = partial(estimate, operator, n_vectors)
            times, errors = [], []
            for _ in range(DRAWS):
                start = time.thread_time()
                diagonal = call()
                times.append(time.thread_time() - start)
                errors.append(float((diagonal - expected).norm() / expected.norm()))
            taken = min(times)
            row = {"method": name, "n_vectors": n_vectors, "milliseconds": 1e3 * taken, "times_ours": taken / own}
            rows.append({**row, "relative_error": sum(errors) / DRAWS})
            n_vectors *= 2
    off = {"N": shape[0], "D": shape[1], "P": shape[2], "fix": fix, "exact_milliseconds": 1e3 * own}
    return {**off, "budgets": BUDGETS[fix], "estimates": rows}


def memory(split: str, fix: str) -> dict[str, float]:
    """Peak memory of one variant at the largest shape, in a separate process."""
    features, weight, bias, pairs = layer(*MEMORY_SHAPE)
    start = time.perf_counter()
    peak = peak_bytes(
        lambda: contrastive_ggn(features, weight, bias, pairs, margin=2.0, split=split, fix=fix)  # pyright: ignore
    )
    return {"mebibytes": peak / 2**20, "seconds": time.perf_counter() - start}


def whole_data_set(N: int, D: int, P: int) -> dict[str, float]:
    """Seconds for every pair of a data set, from features in memory."""
    random: Any = {"generator": torch.Generator(DEVICE).manual_seed(0), "device": DEVICE}
    labels = torch.randint(0, 10, (N,), **random)
    features = torch.randn(10, P, **random)[labels].add_(torch.randn(N, P, **random))
    weight = torch.randn(D, P, **random) / P**0.5
    contrastive_ggn_dataset(features[:4096], weight, labels[:4096], 2.0)
    result: dict[str, float] = {"N": N, "D": D, "P": P, "unordered_pairs": N * (N - 1) // 2}
    for margin in (0.7, 2.0):
        start = time.perf_counter()
        contrastive_ggn_dataset(features, weight, labels, margin)
        synchronise()
        result[f"seconds_margin_{margin}"] = time.perf_counter() - start
    return result


def one_side(B: int, dtype: torch.dtype, D: int = 512) -> tuple[Tensor, Tensor]:
    """Outputs of B images and unit outputs of their texts."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randn(B, D, generator=generator, dtype=torch.float64)
    images = texts + torch.randn(B, D, generator=generator, dtype=torch.float64)
    return images.to(dtype), F.normalize(texts).to(dtype)


def with_matrices(images: Tensor, texts: Tensor) -> Tensor:
    """Σ_a H_a of InfoNCE with one side fixed, with a (D, D) matrix for every image, as in BayesVLM's code.

    For B images and texts, it forms a (B, B, D) array of weighted texts, and (B, D, D) arrays of second moments,
    products of means, Jacobians of the normalisation and the result.
    """
    r = images.norm(dim=1, keepdim=True)
    n = images / r
    p = (n @ texts.T / TEMPERATURE).softmax(1)
    second = (p[..., None] * texts).mT @ texts
    mean = p @ texts
    jacobian = (torch.eye(n.shape[1], dtype=n.dtype) - n[:, :, None] * n[:, None]) / r[..., None]
    return (jacobian @ (second - mean[:, :, None] * mean[:, None]) @ jacobian.mT).sum(0) / TEMPERATURE**2


def without_matrices(images: Tensor, texts: Tensor) -> Tensor:
    """The same from arrays of (B, B) and (B, D)."""
    curvature = SupConCurvature(TEMPERATURE, average=False)
    identity = torch.eye(images.shape[1], dtype=images.dtype)  # a layer whose outputs are the images'
    return output_curvature(images, identity, None, Candidates.paired(texts), curvature, summed=True)


def as_published(file: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The same by the function in a copy of BayesVLM's `hessians.py`."""
    compute = runpy.run_path(file)["compute_hessian_analytic_InfoNCE"]
    return partial(compute, logit_scale=torch.tensor(-math.log(TEMPERATURE), dtype=torch.float64))


def infonce(B: int, form: str) -> dict[str, float]:
    """Seconds of CPU time and peak memory of one form, float32, in a process of its own with one thread."""
    images, texts = one_side(B, torch.float32)
    forms = {"matrices": with_matrices, "sums": without_matrices}
    compute = forms.get(form) or as_published(form)
    compute(images[:32], texts[:32])
    start = time.process_time()
    peak = peak_bytes(lambda: compute(images, texts))
    return {"B": B, "seconds": time.process_time() - start, "mebibytes": peak / 2**20}


def against_matrices(largest: int, published: str | None) -> dict[str, object]:
    """InfoNCE with one side fixed at D = 512, with and without the (B, D, D) arrays.

    If the arrays do not fit into free memory, the bytes are computed as 4 max(B² D + B D², k B D²): the weighted texts
    and the first product, or k arrays of (B, D, D). k is four for the form here, and seven for the published one, which
    keeps all its arrays. The time then grows with the multiply-adds, B² D² + 2 B D³.
    """
    form, held = (published, 7) if published else ("matrices", 4)
    with_them = as_published(published) if published else with_matrices
    sizes, errors = [size for size in (256, 512, 1024, 2048, 4096) if size <= largest], {}
    for B in [size for size in (64, 256, 512) if size <= largest]:
        images, texts = one_side(B, torch.float64)
        expected = with_them(images, texts)
        errors[B] = float((without_matrices(images, texts) - expected).abs().max() / expected.abs().max())
        assert errors[B] < 1e-10
    D = images.shape[1]  # pyright: ignore[reportPossiblyUnboundVariable]

    def n_bytes(B: int) -> int:
        return 4 * max(B**2 * D + B * D**2, held * B * D**2)

    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    slow = {B: in_process(__file__, "--infonce", str(B), form) for B in sizes if 1.1 * n_bytes(B) < free}
    known, rows = max(slow), []
    for B in sizes:
        ours = in_process(__file__, "--infonce", str(B), "sums")
        if B in slow:
            theirs = {**slow[B], "by": "measured"}
        else:
            work = (B**2 * D**2 + 2 * B * D**3) / (known**2 * D**2 + 2 * known * D**3)
            theirs = {"seconds": slow[known]["seconds"] * work, "mebibytes": n_bytes(B) / 2**20, "by": "formula"}
        ratios = {key: theirs[key] / max(ours[key], 1e-9) for key in ("seconds", "mebibytes")}
        rows.append({"B": B, "ours": ours, "matrices": theirs, "ratio": ratios})
    differences = {"largest_relative_difference_in_float64": errors}
    return {"D": D, "published": bool(published), **differences, "float32": rows}


def against_matmuls(shape: tuple[int, int, int]) -> dict[str, object]:
    """`fixed`, arccos, of a batch, compared with its matmuls: least CPU time of one thread, in turn.

    Outputs are computed as by `nn.Linear`, and as in the curvature, which is faster for a narrow layer.
    """
    N, D, P = shape
    features, weight, bias, pairs = layer(*shape)
    n, t = F.normalize(features @ weight.T), pairs.positive.to(features)
    squares, own = features.square(), torch.randn(N, 2 * D)

    def after_outputs() -> None:
        _ = n @ n.T, t @ n, t @ n, own.T @ squares

    calls = {
        "fixed": lambda: contrastive_ggn(features, weight, bias, pairs, margin=2.0),
        "matmuls": lambda: (features @ weight.T, after_outputs()),
        "matmuls_by_rows_of_weights": lambda: (weight @ features.T, after_outputs()),
        "check": lambda: features.norm(),
        "squares": lambda: features.square(),
    }
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(200):
        for name, call in calls.items():
            least[name] = min(least[name], thread_seconds(call))
    milliseconds = {name: 1e3 * value for name, value in least.items()}
    return {"N": N, "D": D, "P": P, "milliseconds": milliseconds, "ratio": least["fixed"] / least["matmuls"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller data set, fewer repeats")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--data-set", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--matmuls", action="store_true", help="`fixed` against its own matmuls alone")
    parser.add_argument("--curvlinops", action="store_true", help="its estimates of a diagonal alone")
    parser.add_argument("--infonce", nargs="*", help="InfoNCE with one side fixed alone, to results/infonce.json")
    parser.add_argument("--published", help="a copy of BayesVLM's hessians.py to measure that against")
    parsed = parser.parse_args()
    N = 6000 if parsed.quick else 60000
    if parsed.memory:
        print(json.dumps(memory(*parsed.memory)))
        return
    if parsed.data_set:
        print(json.dumps(whole_data_set(N, 128, 9216)))
        return
    if parsed.infonce:
        print(json.dumps(infonce(int(parsed.infonce[0]), parsed.infonce[1])))
        return
    if parsed.infonce is not None:
        write("infonce", against_matrices(256 if parsed.quick else 4096, parsed.published))
        return
    if parsed.matmuls:
        torch.set_num_threads(1)
        write("ggn_matmuls", {"cases": [against_matmuls(shape) for shape in SHAPES]})
        return
    if parsed.curvlinops:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        write("curvlinops", {"cases": [estimated(shape, fix) for fix in BUDGETS for shape in SHAPES]})
        return
    repeats = 3 if parsed.quick else 9
    quick = ["--quick"] if parsed.quick else []
    shape = dict(zip("NDP", MEMORY_SHAPE, strict=True))
    # a process keeps main memory; GPU memory is counted exactly
    peak = memory if DEVICE == "cuda" else partial(in_process, __file__, "--memory")
    variants = {f"{split} {fix}": peak(split, fix) for split in SPLITS for fix in FIXES}
    results = {
        "all_pairs": [against_others(shape, repeats) for shape in SHAPES],
        "memory": {**shape, "variants": variants},
        "data_set": in_process(__file__, "--data-set", *quick),
    }
    if DEVICE == "cuda":
        results["a_million"] = whole_data_set(N // 60 * 1000, 128, 2048)
    write(f"ggn{APART}", results)


if __name__ == "__main__":
    sys.exit(main())

"""False alarms of a promise, and the delay of an alarm after a change.

    python benchmarks/promise.py simulated [--streams 1000] [--queries 100000]
    python benchmarks/promise.py real --data FOLDER [--cache build/real]

`simulated`: streams of queries from the distribution of the calibration queries. Two scores of a query have a
correlation of 0.6. The results are shares of streams with a false alarm, by the number of calibration queries: for the
promise; for the same bets on p-values among the calibration queries alone; and for the Kolmogorov-Smirnov distance of
each 1,000 queries at a level of 0.05. Then judged answers to strangers, with a rate of false accepts from the law of
calibration sets, and with twice and five times this rate.

`real`: features of `real.py`. Calibration and queries are drawn from one pool of known items. From some query on, a
tenth of the queries are strangers, or all come from another camera: blurred, or with less contrast. The delay is the
number of queries until the promise is in doubt. results/promise_simulated.json and results/promise_real.json.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real import name_of
from real_data import Places, load
from real_networks import NETWORKS
from real_scores import Cell, part
from scipy.special import betaincinv
from timing import write

from lam.retrieval.decisions.promise import BROKEN, DOUBT, asleep, cells_of, rate_bets, step_bets

SIZES = 200, 1000, 5000
SCORES = 2
STREAMS = 200
"""Streams of real scores."""
NEEDED = 3 / DOUBT  # with feedback there are three tests
REAL = ("efficientnet_lite0", "cifar10"), ("efficientnet_lite0", "omniglot"), ("minilm", "banking77")
CELLS, BLOCK = 4096, 64
WINDOW, KS = 1000, 1.358
FAR = 0.05
CHANGES = {"blur": 2, "contrast": 2}
"""Severity of a new camera, as in `ambiguity.changed_images`: blur by 1/30 of the width, contrast times 0.3."""

Draw = Callable[[int], np.ndarray]


def first_alarm(
    draw: Draw, counts: np.ndarray, rounds: int, generator: np.random.Generator, *, fixed: bool = False
) -> np.ndarray:
    """The round of the first alarm in each stream, or `rounds` + 1: as `Promise`, for R rows at once.

    Args:
        draw: the cells of round t, (R,).
        counts: (R, CELLS) of the calibration.
        rounds: number of rounds.
        generator: breaks ties.
        fixed: whether queries do not join the calibration.
    """
    n_rows, total = len(counts), counts.sum(1)
    fine = counts.reshape(n_rows, -1, BLOCK).astype(np.int32)
    coarse, rows, later = fine.sum(2, dtype=np.int32), np.arange(n_rows), np.tri(BLOCK, k=-1, dtype=np.int32).T.copy()
    won, lost = (np.exp(step_bets(np.array(p))) for p in (0.0, 1.0))
    levels = np.array([0.01, 0.03, 0.1, 0.3]).repeat(len(won) // 4)
    wealth, alarm = np.zeros((n_rows, len(won))), np.full(n_rows, rounds + 1)
    for t in range(rounds):
        block, place = np.divmod(draw(t), BLOCK)
        own = fine[rows, block]
        above = np.einsum("rb,rb->r", coarse, later[block]) + np.einsum("rb,rb->r", own, later[place])
        p = (above + generator.random(n_rows) * (1 + own[rows, place])) / (total + 1)
        if not fixed:
            fine[rows, block, place] += 1
            coarse[rows, block] += 1
            total += 1
        wealth += (asleep(t) - asleep(t + 1)) / len(won)
        wealth *= np.where(p[:, None] <= levels, won, lost)
        np.minimum(wealth, 1e200, out=wealth)
        alarm[(wealth.sum(1) + asleep(t + 1) >= NEEDED) & (alarm > rounds)] = t + 1
    return alarm.reshape(SCORES, -1).min(0)


def histograms(cells: np.ndarray) -> np.ndarray:
    """Counts of each row's cells."""
    shifted = cells + CELLS * np.arange(len(cells))[:, None]
    return np.bincount(shifted.ravel(), minlength=CELLS * len(cells)).reshape(len(cells), CELLS)


def normal_cells(streams: int, generator: np.random.Generator, _: int = 0) -> np.ndarray:
    """Cells of two correlated normal scores, (2 streams,), with the width of the cells of real scores."""
    common, *own = generator.normal(size=(3, streams))
    scores = np.concatenate([0.6**0.5 * common + 0.4**0.5 * values for values in own])
    return np.clip(CELLS // 2 + 150 * scores, 0, CELLS - 1).astype(np.int64)


def ks_alarms(counts: np.ndarray, rounds: int, generator: np.random.Generator) -> np.ndarray:
    """Whether the distance of any window to the calibration exceeds its limit at a level of 0.05, for one score."""
    n, alarm = counts[0].sum(), np.zeros(len(counts) // SCORES, dtype=bool)
    calibrated = counts[: len(alarm)].cumsum(1) / n
    for _ in range(rounds // WINDOW):
        cells = np.stack([normal_cells(len(alarm), generator)[: len(alarm)] for _ in range(WINDOW)], 1)
        distance = np.abs(histograms(cells).cumsum(1) / WINDOW - calibrated).max(1)
        alarm |= distance > KS * (1 / WINDOW + 1 / n) ** 0.5
    return alarm


def broken(rates: np.ndarray, limit: float, rounds: int, generator: np.random.Generator) -> np.ndarray:
    """The round in which judged strangers break the promise, for streams with these rates of false accepts."""
    error, right = (np.exp(rate_bets(np.array(value), limit)) for value in (True, False))
    wealth, alarm = np.zeros((len(rates), len(error))), np.full(len(rates), rounds + 1)
    for t in range(rounds):
        wealth += (asleep(t) - asleep(t + 1)) / len(error)
        wealth *= np.where((generator.random(len(rates)) < rates)[:, None], error, right)
        np.minimum(wealth, 1e200, out=wealth)
        alarm[(wealth.sum(1) + asleep(t + 1) >= 2 / BROKEN) & (alarm > rounds)] = t + 1
    return alarm


def delays(alarm: np.ndarray, before: int, rounds: int) -> dict[str, Any]:
    """False alarms before a change, and median and 90 % quantile of the delay after it; null for never."""
    late = np.sort(alarm[alarm > before] - before)
    median, most = (int(late[int(share * (len(late) - 1))]) for share in (0.5, 0.9))
    never = rounds - before
    return {
        "false_alarms": float((alarm <= before).mean()),
        "median": None if median > never else median,
        "most": None if most > never else most,
        "missed": float((late > never).mean()),
    }


def simulated(streams: int, rounds: int) -> None:
    """Write results/promise_simulated.json."""
    alarms: dict[str, Any] = {}
    for size in SIZES:
        generator = np.random.default_rng(size)
        counts = histograms(np.stack([normal_cells(streams, generator) for _ in range(size)], 1))

        online = first_alarm(partial(normal_cells, streams, generator), counts, rounds, generator)
        few = counts.reshape(SCORES, streams, -1)[:, : streams // 5].reshape(-1, CELLS)
        draw = partial(normal_cells, streams // 5, generator)
        fixed = first_alarm(draw, few, rounds // 5, generator, fixed=True)
        alarms[str(size)] = {
            "promise": float((online <= rounds).mean()),
            "fixed calibration": float((fixed <= rounds // 5).mean()),
            "Kolmogorov-Smirnov": float(ks_alarms(few, rounds // 5, generator).mean()),
        }
        print(size, alarms[str(size)], flush=True)
    feedback: dict[str, Any] = {}
    for size in SIZES:
        generator = np.random.default_rng(size)
        rank = int(np.ceil(round((size + 1) * (1 - FAR), 6)))
        limit = float(betaincinv(size + 1 - rank, rank, 1 - BROKEN / 2))
        rates = generator.beta(size + 1 - rank, rank, streams)
        feedback[str(size)] = {
            "limit": limit,
            "false_alarms": float((broken(rates, limit, rounds, generator) <= rounds).mean()),
            **{
                f"{times} times": delays(broken(np.full(streams, times * FAR), limit, 10_000, generator), 0, 10_000)
                for times in (2, 5)
            },
        }
        print(size, feedback[str(size)], flush=True)
    write("promise_simulated", {"streams": streams, "queries": rounds, "alarms": alarms, "feedback": feedback})


def cells_of_items(cell: Cell, features: torch.Tensor) -> np.ndarray:
    """(2, N) cells of κ and of the first cosine of items in the gallery."""
    posterior = cell.posterior()
    embeddings, gallery = posterior.predict(features), posterior.predict(cell.of("gallery")[0])
    cosines = (embeddings.mean.double() @ gallery.mean.double().T).max(1).values.clamp(-1, 1)
    kappa = embeddings.kappa.double().numpy()
    return np.stack([cells_of("kappa", kappa), cells_of("cosine", cosines.numpy())])


def pools(places: Places, file: Path, network: str, data: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Cells of known items, and of what comes after each change."""
    cell = part(file, data, 0)
    known = torch.cat([cell.of(name)[0] for name in ("calibration", "test")])
    changed = {"strangers": cells_of_items(cell, cell.of("strange")[0])}
    if data == "cifar10":
        from ambiguity import changed_images

        items: list[Any] = load(data, places).items
        rows = cell.rows["test"][torch.randperm(len(cell.rows["test"]), generator=torch.Generator().manual_seed(0))]
        variants = [changed_images(items[row], items[row]) for row in rows[:300].tolist()]
        embed = NETWORKS[network](places.packages)
        for kind, severity in CHANGES.items():
            worse = embed([variant[kind][severity] for variant in variants])["features"]
            changed[kind] = cells_of_items(cell, worse.float())
    return cells_of_items(cell, known), changed


def some(pool: np.ndarray, n: int, generator: np.random.Generator) -> np.ndarray:
    """Cells of random items of a pool."""
    return pool[:, generator.integers(pool.shape[1], size=n)]


def mixed(
    known: np.ndarray, after: np.ndarray, share: float, before: int, generator: np.random.Generator, t: int
) -> np.ndarray:
    """Cells of known items; after `before` rounds, a share of them comes from other items."""
    is_new = (generator.random(STREAMS) < share) & (t >= before)
    return np.where(is_new, some(after, STREAMS, generator), some(known, STREAMS, generator)).ravel()


def real(places: Places, cache: Path) -> None:
    """Write results/promise_real.json."""
    results: dict[str, Any] = {}
    for network, data in (
        ("efficientnet_lite0", "cifar10"),
        ("efficientnet_lite0", "omniglot"),
        ("minilm", "banking77"),
    ):
        name = name_of(network, data)
        known, changed = pools(places, cache / f"{name}.safetensors", network, data)
        results[name] = {"known_items": known.shape[1]}
        for change, after in changed.items():
            share = 0.1 if change == "strangers" else 1.0
            results[name][change] = {}
            for size in SIZES:
                for before in (0, 10_000):
                    generator = np.random.default_rng(size + before)

                    calibrated = some(known, STREAMS * size, generator).reshape(SCORES * STREAMS, size)
                    draw = partial(mixed, known, after, share, before, generator)
                    rounds = before + 10_000
                    alarm = first_alarm(draw, histograms(calibrated), rounds, generator)
                    results[name][change][f"{size}, after {before}"] = delays(alarm, before, rounds)
            print(name, change, results[name][change], flush=True)
    write("promise_real", {"streams": STREAMS, "cells": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_scores = commands.add_parser("simulated")
    of_scores.add_argument("--streams", type=int, default=1000)
    of_scores.add_argument("--queries", type=int, default=100_000)
    of_features = commands.add_parser("real")
    of_features.add_argument("--data", type=Path, required=True)
    of_features.add_argument("--cache", type=Path, default=Path("build/real"))
    parsed = parser.parse_args()
    if parsed.command == "simulated":
        simulated(parsed.streams, parsed.queries)
    else:
        real(Places(parsed.data, parsed.cache), parsed.cache)


if __name__ == "__main__":
    main()

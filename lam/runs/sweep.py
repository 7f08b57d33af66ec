"""A sweep: one configuration with several seeds; mean and standard deviation of the metrics.

    seed-0/, seed-1/, ...   folders of the runs
    sweep.json              metrics of each seed, their mean and standard deviation, and the number of seeds

A second start with the same settings continues the sweep and keeps finished runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lam.runs.config import RunConfig
from lam.runs.folder import CONFIG
from lam.runs.run import run
from lam.utils import distributed
from lam.utils.checks import check_at_least
from lam.utils.files import write_json
from lam.utils.summary import summary

SWEEP = "sweep.json"


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep: metrics by seed; mean, standard deviation (by n − 1) and undefined seeds by metric."""

    folder: Path
    metrics: dict[int, dict[str, Any]]
    mean: dict[str, float]
    std: dict[str, float]
    undefined: dict[str, list[int]]


def seeds_of(config: RunConfig, count: int) -> range:
    """`count` seeds, starting at the configuration's seed.

    Seeds of a method with several networks, such as an ensemble, are so far apart that no two runs share a network.

    Example:
        >>> from lam.runs.config_files import load_config
        >>> seeds_of(load_config("digits laplace_posthoc"), 5)
        range(0, 5)
    """
    check_at_least("seeds", count, 1)
    step = config.method.n_seeds
    return range(config.seed, config.seed + count * step, step)


def sweep(config: RunConfig, seeds: Sequence[int], *, progress: bool = True) -> SweepResult:
    """Run a configuration with each of these seeds, on the same splits.

    Args:
        config: configuration of the runs; `output` is the folder of the sweep, by default the run's folder with
            `-sweep` appended.
        progress: show stages and progress on standard error.

    Raises:
        ValueError: for no seeds, a repeated seed or a folder that is a run; also as `lam.runs.run.run`. Finished runs
            stay.

    Example:
        >>> import tempfile
        >>> from lam.runs.config_files import load_config
        >>> folder = tempfile.mkdtemp()
        >>> tiny = [f"--output={folder}/sweep", "--data.limit=60", "--training.epochs=1", "--evaluation.corrupted=0"]
        >>> result = sweep(load_config("digits norm", tiny), seeds=[7], progress=False)
        >>> 0 <= result.mean["map@1"] <= 1, sorted(path.name for path in result.folder.iterdir())
        (True, ['seed-7', 'sweep.json'])
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be one or more different numbers, got {list(seeds)}")
    folder = config.folder.with_name(f"{config.folder.name}-sweep") if config.output is None else config.folder
    if (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds a run, not a sweep: give another --output")
    metrics: dict[int, dict[str, Any]] = {}
    for seed in seeds:
        metrics[seed] = run(replace(config, seed=seed, output=str(folder / f"seed-{seed}")), progress=progress).metrics
        if distributed.is_rank_zero():
            write_json(folder / SWEEP, {"seeds": metrics, **summary(metrics)})
    over_seeds = summary(metrics)
    return SweepResult(folder, metrics, over_seeds["mean"], over_seeds["std"], over_seeds["undefined"])

"""Several processes give the same weights, curvatures and runs as one; if one fails, all end.

Two processes on the CPU, by gloo; CUDA and NCCL need machines that these tests do not have.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lam.utils import distributed
from lam.utils.files import read_tensors, verify
from tests.conftest import TINY
from tests.helpers import run_python
from tests.utils import two_processes

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

ROOT = Path(__file__).parents[2]
TRAINED = {
    "training": 1e-5,
    "mined_training": 1e-5,
    "ensemble": 1e-5,
    "online": 1e-5,
    "views": 1e-5,
    "steady_heads": 1e-4,
    "fit_added_layer": 1e-4,
}
"""Tolerances for float32 gradients that are summed in another order, after a few steps or hundreds."""
FITTED = 1e-6


def torchrun(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Start a command in two processes."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    return subprocess.run(
        [*launcher, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes wrote the tensors of each function, with a file for each process."""
    folder = tmp_path_factory.mktemp("two")
    ended = torchrun(two_processes.__file__, folder)
    assert ended.returncode == 0, ended.stderr
    return folder


def left_by(folder: Path, function: Callable[..., Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    first, second = (read_tensors(folder / f"{function.__name__}-{rank}.safetensors") for rank in (0, 1))
    return first, second


def test_workers_are_not_forked_from_one_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed.worker_context(2) is None
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    context = distributed.worker_context(2)
    assert context is not None
    assert context.get_start_method() == "forkserver"
    assert distributed.worker_context(0) is None


@pytest.mark.parametrize("function", [*two_processes.ALIKE, *two_processes.SAME_ON_ALL])
def test_all_processes_are_left_with_the_same_bits(of_two: Path, function: Callable[..., Any]) -> None:
    first, second = left_by(of_two, function)
    assert first.keys() == second.keys() != set()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("function", two_processes.ALIKE)
def test_two_processes_equal_one(of_two: Path, tmp_path: Path, function: Callable[[Path], dict[str, Tensor]]) -> None:
    found, _ = left_by(of_two, function)
    expected = function(tmp_path)
    tolerance = TRAINED.get(function.__name__, FITTED)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(found[name].to(tensor), tensor, rtol=tolerance, atol=tolerance * scale, msg=name)


def test_a_stopped_run_of_two_processes_ends_as_if_nothing_had_happened(of_two: Path) -> None:
    first, _ = left_by(of_two, two_processes.resumed)
    assert first["same"]


def test_networks_of_half_precision_keep_float32_weights_and_curvatures(of_two: Path) -> None:
    first, _ = left_by(of_two, two_processes.half_precision)
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in first.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("batch", "batch_size must be at least 4, 2 for each of the 2 processes, got 3"),
        ("first", "the first process cannot write"),
        ("download", "HTTP Error 404: no such file"),
        ("sampler", "the loader's DistributedSampler divides items"),
        ("diverging", "the loss is nan at epoch 1, step 1: lower learning_rate"),
        ("empty", "the loader gave no batch"),
    ],
)
def test_every_process_refuses_what_one_would(of_two: Path, name: str, message: str) -> None:
    first, _ = left_by(of_two, two_processes.refusals)
    assert message in bytes(first[name].tolist()).decode()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed by name in /proc")
def test_no_thread_of_gloo_is_left_to_abort_a_process_that_ends(of_two: Path) -> None:
    for rank in (0, 1):
        threads = (of_two / f"threads-{rank}.txt").read_text()
        assert threads
        assert "gloo" not in threads


def test_a_run_of_two_processes_equals_that_of_one(tmp_path: Path) -> None:
    folder, alone = tmp_path / "run", tmp_path / "alone"
    # without clipped weights, no other curvature is tried; without eigenvectors, no sign is arbitrary: equal votes
    command = ("-m", "lam", "demo", *TINY, "--method.structure=diag", "--method.fix=projected")
    run_python(*command, f"--output={alone}")
    ended = torchrun(*command, f"--output={folder}")
    assert ended.returncode == 0, ended.stderr
    verify(folder, ["config.yaml", "metrics.json", "report.html"])
    assert ended.stderr.count("train ...") == ended.stdout.count("report:") == 1  # one process prints for all
    found, expected = (json.loads((path / "metrics.json").read_text()) for path in (folder, alone))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not name.startswith("seconds_"):
            # from a nearly singular covariance of few items, or from ranks, which may be exchanged
            loose = "mahalanobis" in name or "_trend" in name
            # an exchange changes a p-value, a quotient or a rank correlation by more
            jumpy = name.startswith(("mann_whitney_p", "nauc")) or "_trend" in name
            tolerance = (5e-2 if jumpy else 1e-2) if loose else 1e-4
            if name.startswith(("ece", "tuned_ece")):
                tolerance = 2 / 60  # for votes: one query changes its bin
            assert found[name] == pytest.approx(value, abs=tolerance, rel=1e-3), name  # κ is an inverse
    posteriors = [read_tensors(next(path.glob("encoder/*/posterior.safetensors"))) for path in (folder, alone)]
    for name, tensor in posteriors[1].items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(posteriors[0][name], tensor, rtol=1e-4, atol=1e-4 * scale, check_dtype=False)
    again = torchrun(*command, f"--output={folder}")
    assert (again.returncode, again.stdout) == (0, ended.stdout)


FAILING = """
import sys
from tests.utils.two_processes import *

class Broken(Images):
    def __getitem__(self, index):
        if distributed.rank() == 1:
            raise OSError("the disk of this process is gone")
        return super().__getitem__(index)

fit(network(), Broken())
"""


def test_where_one_process_fails_all_end(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    ended = torchrun(tmp_path / "failing.py")
    assert ended.returncode != 0
    assert "disk of this" in ended.stderr


def test_processes_that_torchrun_did_not_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="2 processes.*torchrun"):
        two_processes.fit(two_processes.network())


def test_in_one_process_nothing_is_joined_and_everything_comes_back() -> None:
    distributed.join()
    assert (distributed.world_size(), distributed.rank(), distributed.is_rank_zero()) == (1, 0, True)
    tensor = torch.ones(2)
    assert distributed.all_reduce(tensor) is tensor
    first, own = distributed.shard(iter([1, 2, 3]))
    assert (first, list(own)) == (1, [1, 2, 3])
    assert distributed.shard([])[0] is None
    assert list(distributed.batches_of_all([(1,), (2,)])) == [(1,), (2,)]

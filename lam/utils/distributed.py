"""Ranks, broadcasts, sums, gathers and shards for the processes that torchrun starts.

In a single process, broadcasts and sums change nothing. `lam.training` chooses devices and averages gradients.
"""

import atexit
import gc
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import chain
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

T = TypeVar("T")

LONGEST_WAIT = timedelta(hours=6)
"""Timeout of processes that wait while the first one evaluates; torchrun ends all processes as soon as one fails."""

_IS_ALONE = ContextVar("is_alone", default=False)


def join() -> None:
    """Join the other processes of torchrun, once; does nothing in a single process.

    Tensors on CUDA go through NCCL, all else through gloo, so waiting processes keep no GPU busy.
    """
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        return
    # DistributedDataParallel imports this module later; an import while a group exists keeps the group after `leave`
    import torch._dynamo

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=LONGEST_WAIT)
    atexit.register(leave)


def leave() -> None:
    """Leave the other processes, if this one has joined them; also called when the process ends.

    This ends gloo's threads. Otherwise, a thread that releases a tensor at the interpreter's end aborts the process.
    """
    if dist.is_initialized():
        gc.collect()  # a DistributedDataParallel left over would end the group before its threads have finished
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Within the context, this process works as the only one, while the others wait for it."""
    token = _IS_ALONE.set(True)
    try:
        yield
    finally:
        _IS_ALONE.reset(token)


def world_size() -> int:
    """Number of processes; 1 before `join`, and within `alone`."""
    if _IS_ALONE.get():
        return 1
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0, also before `join`; 0 within `alone`."""
    if _IS_ALONE.get():
        return 0
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def is_rank_zero() -> bool:
    """Whether this process writes files and messages for all."""
    return rank() == 0


def broadcast_from_rank_zero(function: Callable[[], T]) -> T:
    """Call a function in the first process only; all processes wait for its result, or its error."""
    if world_size() == 1:
        return function()
    outcome: list[Any] = [None, None]
    own_error: Exception | None = None
    if is_rank_zero():
        try:
            outcome[0] = function()
        except Exception as error:
            own_error, outcome[1] = error, _as_picklable(error)
    dist.broadcast_object_list(outcome, src=0)
    value, error = outcome
    if own_error is not None or error is not None:
        raise own_error or error
    return value


def _as_picklable(error: Exception) -> Exception:
    """The error, or a `RuntimeError` with its text if other processes cannot get it, such as an `HTTPError`."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(str(error))
    return error


def rank_zero_first(function: Callable[[], T]) -> T:
    """Call a function in the first process, then in the others, which then find complete downloads."""
    values: list[T] = []
    broadcast_from_rank_zero(lambda: values.append(function()))
    return values[0] if is_rank_zero() else function()


def all_reduce(tensor: Tensor) -> Tensor:
    """Sum of a tensor over all processes, the same to the bit in each process."""
    if world_size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def overwrite_by_rank_zero(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors in place with their values in the first process."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def all_gather(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Rows (N, ...) of all processes in the order of their ranks, from n rows of each; gradients flow back.

    The gradient of a row is the sum of its gradients in all processes. If each process computes the same loss of all
    rows, the mean of the weights' gradients over processes is the gradient of a single process.
    """
    return _AllGather.apply(rows, tuple(sizes))  # pyright: ignore[reportReturnType]


def shard(loader: Iterable[T]) -> tuple[T | None, Iterator[T]]:
    """The first batch of a loader (None if it is empty), and the batches r, r + W, r + 2W, ... of process r of W.

    For a `DataLoader` with a batch size, the first process draws the order, and each process reads only the first batch
    and its own batches. Any other loader, or one of an `IterableDataset`, must give the same batches in every process;
    each process reads all batches. A `DistributedSampler` is a `ValueError`.

    Example:
        >>> first, own = shard("abc")
        >>> first, list(own)
        ('a', ['a', 'b', 'c'])
    """
    if world_size() == 1:
        batches = iter(loader)
    elif (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)  # has an endless sampler
    ):
        batches = iter(_own_loader(loader))
    else:
        batches = _own(loader)
    first = next(batches, None)
    if first is None:
        return None, iter(())
    return first, chain([first], batches) if is_rank_zero() else batches


def worker_context(num_workers: int) -> BaseContext | None:
    """Start method of a `DataLoader`'s workers; None, the default, in a single process or without workers.

    Neither gloo nor NCCL survives a fork: a worker forked at the wrong moment never starts, and all processes hang.
    So, for several processes, a server without threads forks the workers, and data sets must be picklable.

    Source: the documentation of `torch.nn.parallel.DistributedDataParallel`.
    """
    if num_workers == 0 or world_size() == 1:
        return None
    context = get_context("forkserver")
    context.set_forkserver_preload(["lam"])
    return context


def batches_of_all(batches: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Batches of all processes, in their order before `shard`; with several processes, tensors are on the CPU."""
    if world_size() == 1:
        yield from batches
        return
    iterator = iter(batches)
    while True:
        gathered: list[Any] = [None] * world_size()
        own = next(iterator, None)
        dist.all_gather_object(gathered, own and tuple(x.cpu() if isinstance(x, Tensor) else x for x in own))
        present = [batch for batch in gathered if batch is not None]
        yield from present
        if len(present) < world_size():
            return


class _AllGather(torch.autograd.Function):
    """All-gather with gradients, for any number of rows in each process.

    `torch.distributed.nn.all_gather` is deprecated, needs equal numbers of rows, and sums gradients in half precision.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.sizes = sizes
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        total = all_reduce(gradient.to(torch.promote_types(gradient.dtype, torch.float32))).to(gradient.dtype)
        return total.split(ctx.sizes)[rank()], None


class _Indices(Dataset[Any]):
    """A data set that returns its indices."""

    def __getitem__(self, index: Any) -> Any:
        return index


def _own(batches: Iterable[T]) -> Iterator[T]:
    return (batch for i, batch in enumerate(batches) if i == 0 or i % world_size() == rank())


def _own_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader that yields the first batch of the whole order, and then this process's batches."""
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "the loader's DistributedSampler divides items between processes, but lam divides batches: leave it out"
        )
    indices = {"batch_sampler": loader.batch_sampler, "generator": loader.generator, "collate_fn": list}
    # makes the same random draws as the loader itself
    order: list[Any] = broadcast_from_rank_zero(lambda: list(DataLoader(_Indices(), **indices)))
    own = list(_own(order))
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    options["multiprocessing_context"] = options["multiprocessing_context"] or worker_context(loader.num_workers)
    return DataLoader(loader.dataset, batch_sampler=own, generator=loader.generator, **options)

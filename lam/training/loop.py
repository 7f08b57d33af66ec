"""The training loop: epochs, updates, validation, and the contents of a checkpoint.

`lam.training.train` checks the arguments and runs the loop. Every random number follows from the seed, the epoch and
the batch, so a resumed run needs no random state.

Each of several processes runs the network on its part of a batch, gathers all outputs with their gradients, and
computes the loss of all pairs; DistributedDataParallel averages the gradients. The result differs from a single
process in the order of summation. Dropout and augmentation draw other random numbers, except in the first part of a
batch. Batch norm uses the statistics of each part; the first process's running statistics are kept.
"""

import copy
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from lam.losses import TrainableLoss
from lam.models.weights import with_versions
from lam.pairs.pairs import as_targets
from lam.training import checkpoints
from lam.training.batches import Batches, read_batch, with_features
from lam.training.settings import Training
from lam.training.steps import DivergenceError, Minibatch, Step
from lam.utils import distributed
from lam.utils.random import derive_seed, derive_seed_of_part, reseed

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}

_COMPARED = 8  # a checkpoint is resumed only if this number of items have the same values as before


@dataclass(frozen=True)
class History:
    """The record of a training, epoch by epoch.

    Attributes:
        losses: mean training loss of each epoch.
        validation: value of `validate` after each epoch; empty without `validate`.
        seconds: duration of each epoch, validation included.
        best_epoch: epoch of the final weights, counted from 1.
        batches_without_positives: number of skipped batches, which had no positive pair.
        learned: learned parameters of the loss, by name; empty for most losses.
    """

    losses: tuple[float, ...]
    validation: tuple[float, ...]
    seconds: tuple[float, ...]
    best_epoch: int
    batches_without_positives: int
    learned: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class _Progress:
    """Progress of training, saved as JSON in checkpoints."""

    epoch: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    elapsed: float = 0.0
    skipped: int = 0
    best_epoch: int = 0
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Loop:
    """One training with `lightning_fabric`; call `run` once."""

    def __init__(
        self, fabric: Any, network: nn.Module, dataset: Any, training: Training, step: Step, method: str | None
    ) -> None:
        self.fabric, self.network, self.dataset, self.training, self.step = fabric, network, dataset, training, step
        self.method, self.pairs = method, training.relation.pairs
        self.folder = None if training.folder is None else Path(training.folder)
        self.loss, parameters = training.loss, list(network.parameters())
        self.stateful: dict[str, Any] = {"network": network, "step": step}  # a checkpoint holds their states
        if isinstance(training.loss, TrainableLoss):  # needs no DDP: each process has the whole batch's gradient
            self.loss = self.stateful["loss"] = copy.deepcopy(training.loss).to(fabric.device)
            parameters += self.loss.parameters()
        self.plain_optimizer = OPTIMIZERS[training.optimizer](
            parameters, lr=training.learning_rate, weight_decay=training.weight_decay
        )
        self.module, self.optimizer = fabric.setup(network, self.plain_optimizer)
        self.sizes: tuple[int, ...] = ()
        if distributed.world_size() > 1:
            self.module.register_forward_hook(lambda _module, _inputs, output: self._gather(output))
        self.n_batches = math.ceil(len(dataset) / training.batch_size)
        self.resume_key = self._resume_key()
        self.at = _Progress()
        self.best: dict[str, Tensor] = {}

    def run(self) -> History:
        """Train to the last epoch, from the last checkpoint if there is one."""
        self._restore()
        shows = self.training.progress and distributed.is_rank_zero()
        self.dataset = with_features(self.network, self.dataset, num_workers=self.training.num_workers, progress=shows)
        at, epochs = self.at, self.training.epochs
        self.clock = time.perf_counter()
        done = at.epoch * self.n_batches + at.batch
        with tqdm(total=epochs * self.n_batches, initial=done, unit="batch", disable=not shows) as bar:
            while at.epoch < epochs:
                bar.set_description(f"epoch {at.epoch + 1}/{epochs}")
                self._epoch(bar)
        if self.best:
            self._load_weights(self.best)
        self.network.eval()
        learned = self.loss.learned()
        return History(tuple(at.losses), tuple(at.validation), tuple(at.seconds), at.best_epoch, at.skipped, learned)

    def _epoch(self, bar: tqdm) -> None:
        at, training = self.at, self.training
        self.has_negatives = at.batch > 0  # the part before an interruption may have held some
        self.module.train()
        for group in self.plain_optimizer.param_groups:
            group["lr"] = training.learning_rate * training.learning_rate_decay**at.epoch
        batches = Batches(
            self.dataset,
            batch_size=training.batch_size,
            seed=training.seed,
            epoch=at.epoch,
            per_class=training.per_class,
            process=(distributed.rank(), distributed.world_size()),
        )
        for inputs, labels in DataLoader(
            batches,
            batch_size=None,
            sampler=range(at.batch, self.n_batches),
            num_workers=training.num_workers,
            multiprocessing_context=distributed.worker_context(training.num_workers),
            generator=torch.Generator(),  # without it, the loader draws a seed from torch's global generator
        ):
            self.sizes = tuple(getattr(self.dataset, "views", 1) * size for size in batches.sizes(at.batch))
            self._batch(inputs, as_targets(labels))
            at.batch += 1
            bar.update()
            if at.loss_count:
                bar.set_postfix(loss=f"{at.loss_sum / at.loss_count:.4f}", refresh=False)
            if training.checkpoint_every and at.batch % training.checkpoint_every == 0 and at.batch < self.n_batches:
                self._save()
        self._close_epoch()
        self._save()

    def _batch(self, inputs: Tensor, labels: Tensor) -> None:
        at = self.at
        inputs, labels = self.fabric.to_device((inputs, labels))
        labels = self._gather(labels)
        pairs = self.pairs(labels)
        if pairs.n_positives == 0:
            at.skipped += 1
            return
        self.has_negatives |= pairs.n_negatives > 0
        place = (self.training.seed, at.epoch, at.batch, "step")
        # dropout must differ between the parts of a batch; a step's random numbers must agree in all processes
        reseed(derive_seed_of_part(distributed.rank() if self.sizes else 0, *place), self.fabric.device)
        self.optimizer.zero_grad()
        torch.clear_autocast_cache()  # an autocast around the training also keeps casts of passes without gradients
        generator = torch.Generator().manual_seed(derive_seed(*place))
        batch = Minibatch(inputs, pairs, at.epoch, generator, labels, self.training.mining, self.sizes)
        try:
            loss = self.step.backward(self.module, self.loss, batch, self._backward).item()
        except DivergenceError as error:
            raise self._diverged(str(error), at.batch + 1) from error
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}", at.batch + 1)
        self.optimizer.step()
        torch.clear_autocast_cache()  # holds casts of the old weights
        at.loss_sum += loss
        at.loss_count += 1

    def _backward(self, value: Tensor) -> None:
        if not value.requires_grad:
            raise ValueError(
                f"the loss {value.item():g} has no gradient: compute it from the network's output without .item(), "
                ".detach(), new tensors or torch.no_grad(); for a loss of zero give 0 * embeddings.sum()"
            )
        self.fabric.backward(value)

    def _gather(self, output: Any) -> Any:
        if not self.sizes:
            return output
        from lightning_utilities import apply_to_collection

        return apply_to_collection(output, Tensor, distributed.all_gather, self.sizes)

    def _close_epoch(self) -> None:
        at = self.at
        if at.loss_count == 0 or not self.has_negatives:
            lacking, advice = ("negative", "more classes") if at.loss_count else ("positive", "more items of a class")
            raise ValueError(
                f"no batch of epoch {at.epoch + 1} holds a {lacking} pair: raise batch_size (now "
                f"{self.training.batch_size}) or give {advice}"
            )
        distributed.overwrite_by_rank_zero(self.network.buffers())  # running statistics differ between processes
        self._check_weights()
        at.losses.append(at.loss_sum / at.loss_count)
        if self.training.validate is None:
            at.best_epoch = at.epoch + 1
        else:
            self._validate(self.training.validate)
        self._tick()
        at.seconds.append(at.elapsed)
        at.epoch, at.batch, at.loss_sum, at.loss_count, at.elapsed = at.epoch + 1, 0, 0.0, 0, 0.0

    def _validate(self, validate: Callable[[nn.Module], float]) -> None:
        at = self.at

        def judge() -> float:
            self.network.eval()
            reseed(derive_seed(self.training.seed, at.epoch, "validation"), self.fabric.device)
            with torch.no_grad():
                value = validate(self.network)
            if not hasattr(value, "__float__"):
                raise ValueError(f"validate must return a number, higher for a better network, got {value!r:.80}")
            return float(value)

        value = distributed.broadcast_from_rank_zero(judge)
        if not math.isfinite(value):
            raise self._diverged(f"the validation is {value}", at.batch)
        if value > max(at.validation, default=-math.inf):
            at.best_epoch = at.epoch + 1
            self.best = {name: tensor.detach().clone() for name, tensor in self._weights().items()}
        at.validation.append(value)

    def _weights(self) -> dict[str, Tensor]:
        return _flatten({owner: part.state_dict() for owner, part in self.stateful.items()})

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        states = _unflatten(weights)
        for owner, part in self.stateful.items():
            part.load_state_dict(with_versions(part, states.get(owner, {})))
        torch.clear_autocast_cache()  # holds casts of the old weights

    def _check_weights(self) -> None:
        for name, tensor in self._weights().items():
            if not tensor.isfinite().all():
                raise self._diverged(f"{name} is not finite", self.at.batch)

    def _diverged(self, problem: str, batch: int) -> DivergenceError:
        remaining = "" if self.folder is None else f"; the last checkpoint in {self.folder} is kept"
        return DivergenceError(
            f"{problem} at epoch {self.at.epoch + 1}, step {self.at.epoch * self.n_batches + batch}: lower "
            f"learning_rate (now {self.training.learning_rate}) or check the data{remaining}"
        )

    def _tick(self) -> None:
        now = time.perf_counter()
        self.at.elapsed, self.clock = self.at.elapsed + now - self.clock, now

    def _save(self) -> None:
        if (folder := self.folder) is None:
            return
        self._check_weights()
        self._tick()

        def write() -> None:
            optimizer = _flatten(self.plain_optimizer.state_dict()["state"])
            tensors = _flatten({"last": self._weights(), "best": self.best, "optimizer": optimizer})
            scaler = self.fabric.strategy.precision.state_dict()
            state = {"settings": self.resume_key, "progress": asdict(self.at), "scaler": scaler}
            checkpoints.save(folder, self.at.epoch * self.n_batches + self.at.batch, tensors, state)

        distributed.broadcast_from_rank_zero(write)

    def _restore(self) -> None:
        if (folder := self.folder) is None:
            return
        checkpoint = distributed.broadcast_from_rank_zero(lambda: checkpoints.load(folder))
        if checkpoint is None:
            return
        self._check_settings(checkpoint)
        self.at = _Progress(**checkpoint.state["progress"])
        groups = _unflatten(checkpoint.tensors)
        self._load_weights(groups["last"])
        self.best = groups.get("best", {})
        state = {int(parameter): values for parameter, values in _unflatten(groups.get("optimizer", {})).items()}
        param_groups = self.plain_optimizer.state_dict()["param_groups"]
        self.plain_optimizer.load_state_dict({"state": state, "param_groups": param_groups})
        self.fabric.strategy.precision.load_state_dict(checkpoint.state["scaler"])

    def _check_settings(self, checkpoint: checkpoints.Checkpoint) -> None:
        saved, now = checkpoint.state["settings"], self.resume_key
        if changed := [name for name in now if saved.get(name) != now[name]]:
            raise ValueError(
                f"{checkpoint.path} has other settings: "
                + ", ".join(f"{name} {saved.get(name)!r}, now {now[name]!r}" for name in changed)
                + "; use those, or another folder"
            )
        reached = checkpoint.state["progress"]
        if (reached["epoch"], reached["batch"]) > (self.training.epochs, 0):
            raise ValueError(
                f"{checkpoint.path} is in epoch {reached['epoch'] + 1}, beyond epochs={self.training.epochs}: ask for "
                "more epochs, or use another folder"
            )

    def _resume_key(self) -> dict[str, Any]:
        """All settings that determine the weights, as JSON; a checkpoint is resumed only with equal settings."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.network.state_dict().items()}
        resume_key = {
            "method": self.method,
            **self.training.resume_key(),
            "loss": repr(self.training.loss),
            "pairs": "by label" if self.training.by_label else repr(self.training.relation),
            "step": type(self.step).__name__,
            "step_settings": self.step.settings,
            "validated": self.training.validate is not None,
            "items": len(self.dataset),
            **{name: _fingerprint_of(self.dataset, name) for name in ("labels", "targets")},
            "values": None if self.folder is None else _fingerprint_of_values(self.dataset),
            "network": f"{type(self.network).__name__} of shapes {_fingerprint(shapes)}",
        }
        text = json.dumps(resume_key, default=methodcaller("item"))  # numbers of NumPy become plain numbers
        return json.loads(re.sub(" at 0x[0-9a-f]+", "", text))  # another process has other memory addresses


def _flatten(groups: Mapping[Any, Mapping[str, Tensor | None]]) -> dict[str, Tensor]:
    """Tensors of all groups by "group/name", without None (in an optimizer before its first step)."""
    named = {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _unflatten(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Inverse of `_flatten`."""
    groups: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        group, name = path.split("/", 1)
        groups.setdefault(group, {})[name] = tensor
    return groups


def _fingerprint_of(dataset: Any, name: str) -> str | None:
    values = getattr(dataset, name, None)
    return None if values is None else _fingerprint(values.tolist() if hasattr(values, "tolist") else list(values))


def _fingerprint_of_values(dataset: Any) -> str | None:
    """Fingerprint of the values of a few items; None if the data set reads the same items differently each time."""
    some = sorted({number * (len(dataset) - 1) // (_COMPARED - 1) for number in range(_COMPARED)})

    def read() -> str:
        digest = hashlib.sha256()
        for part in read_batch(dataset, some, seed=0):
            is_tensor = isinstance(part, Tensor)
            values = part.cpu().flatten().view(torch.uint8).numpy().tobytes() if is_tensor else repr(part).encode()
            digest.update(values)
        return digest.hexdigest()[:12]

    first, second = read(), read()
    return first if first == second else None


def _fingerprint(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]

"""Work that one process and several must do alike: each function returns tensors by name, to be compared.

`torchrun two_processes.py FOLDER` runs all functions in every process, which writes the tensors into its own file.
"""

import sys
from collections.abc import Callable, Iterator
from email.message import Message
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import lam
from lam import losses, models
from lam.datasets import TensorImages
from lam.encoders.bayesian import BayesianEncoder
from lam.hessians import ContrastiveCurvature
from lam.methods import Byol, DeepEnsemble, Hib, LaplaceOnline, Pfe, Simclr, Simsiam, Swav
from lam.methods.laplace_online import OnlineLaplaceStep
from lam.methods.views import ViewsMethod
from lam.models.kappa_head import UncertaintyHead
from lam.pairs.relation import Relation
from lam.training import History, Minibatch, Step, Training, train
from lam.utils import distributed
from lam.utils.files import write_tensors

LOSS = losses.build(margin=0.7)
SIZE, BATCH = 45, 14  # parts of 7 and 7; the last batch has 3 items, too few for two processes


class Images:
    """Images of four classes, with a random shift at every reading."""

    def __init__(self, shift: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels, self.shift = torch.arange(SIZE) % 4, shift
        self.images = torch.rand(SIZE, 1, 8, 8, generator=generator) + self.labels[:, None, None, None] / 4

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index] + self.shift * torch.randn(1), int(self.labels[index])


class Stream(IterableDataset[Any]):
    """`Images` without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        images = Images()
        return (images[index] for index in range(SIZE))


def network(seed: int = 0) -> Any:
    return models.build("convnet8", dimension=3, seed=seed)


def noisy_network() -> Any:
    """A network with batch norm and dropout, which differ between one process and two."""
    noisy = network()
    noisy.features.append(nn.BatchNorm1d(512))
    noisy.features.append(nn.Dropout(0.3))
    return noisy


def fit(trained: nn.Module, dataset: Any = None, **options: Any) -> History:
    options = {"loss": LOSS, "epochs": 2, "batch_size": BATCH, "accelerator": "cpu", "progress": False} | options
    step = options.pop("step", None)
    return train(trained, Images() if dataset is None else dataset, Training(**options), step=step)


def weights(trained: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trained.state_dict().items()}


def posterior(encoder: BayesianEncoder) -> dict[str, Tensor]:
    variance: Any = encoder.posterior.variance
    return {"variance": variance, "h": encoder.posterior.curvature.h, "counts": counts(encoder)}


def counts(encoder: BayesianEncoder) -> Tensor:
    return torch.tensor([*(encoder.posterior.curvature.counts or ()), encoder.posterior.n_items])


# The same up to the order of sums.


def training(folder: Path) -> dict[str, Tensor]:
    trained = network()
    history = fit(trained, folder=folder, checkpoint_every=1, validate=lambda n: float(n.head.weight.sum()))
    history_tensors = {"losses": torch.tensor(history.losses), "validation": torch.tensor(history.validation)}
    return weights(trained) | history_tensors | {"best": torch.tensor(history.best_epoch)}


def mined_training(folder: Path) -> dict[str, Tensor]:
    trained = network()
    mining = {"miner": "semihard", "max_pairs": 20, "per_class": 4}
    fit(trained, optimizer="sgd", learning_rate=0.05, batch_size=16, num_workers=1, **mining)
    return weights(trained)


def ensemble(folder: Path) -> dict[str, Tensor]:
    options: dict[str, Any] = {"optimizer": "sgd", "accelerator": "cpu", "progress": False, "folder": folder}
    trained = DeepEnsemble(n_members=2).train(network(), Images(), Training(loss=LOSS, epochs=1, **options))
    return {"mean": trained.encoder.embed(Images().images).mean}


def online(folder: Path) -> dict[str, Tensor]:
    trained = network()
    options = LaplaceOnline(n_samples=2, memory_factor=0.9, hessian_miner="semihard", hessian_max_pairs=30)
    step = OnlineLaplaceStep("head", options)
    fit(trained, step=step, optimizer="sgd", learning_rate=0.01)
    assert step.h is not None
    return weights(trained) | {"h": step.h}


def loader(**options: Any) -> DataLoader[Any]:
    options = {"shuffle": True, "generator": torch.Generator().manual_seed(3), "batch_size": 10} | options
    return DataLoader(Images(), **options)  # pyright: ignore[reportArgumentType]


def fitted(batches: Any, **options: Any) -> dict[str, Tensor]:
    return posterior(lam.fit(network(), batches, lam.Laplace(margin=0.7, **options), progress=False))


def fits(folder: Path) -> dict[str, Tensor]:
    """Posteriors by several kinds of pairs, batches and curvatures."""
    data = Images()
    full, positive = (ContrastiveCurvature(0.7, "euclidean", fix) for fix in ("full", "positive"))
    cases: dict[str, dict[str, Tensor]] = {
        "batches": fitted(loader()),
        "full": fitted(loader(num_workers=1), curvature=full),
        "mined": fitted(loader(), pairs=Relation(miner="semihard", max_pairs=5)),
        "one batch": fitted(loader(batch_size=SIZE)),
        "list": fitted(list(zip(data.images.split(10), data.labels.split(10), strict=True))),
        "stream": fitted(DataLoader(Stream(), batch_size=10)),
        "dataset": fitted(loader(), pairs="dataset"),
        "positive dataset": fitted(loader(), pairs="dataset", curvature=positive),
    }
    return {f"{case}.{name}": tensor for case, tensors in cases.items() for name, tensor in tensors.items()}


def fit_structures(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for structure, pairs in product(("kron", "ekfac", "full", "low_rank"), ("batch", "dataset")):
        laplace = lam.Laplace(margin=0.7, structure=structure, pairs=pairs)
        encoder = lam.fit(network(), loader(), laplace, progress=False)
        variance = encoder.posterior.output_spread()(encoder.features(Images().images)).variance
        tensors |= {f"{structure}.{pairs}": variance, f"{structure}.{pairs}.counts": counts(encoder)}
    return tensors


def fit_layers(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for structure in ("diag", "kron"):
        laplace = lam.Laplace(margin=0.7, layers="all", structure=structure)
        encoder = lam.fit(network(), loader(), laplace, progress=False)
        tensors |= {structure: encoder.embed(Images().images).variance, f"{structure}.counts": counts(encoder)}
    return tensors


def fit_added_layer(folder: Path) -> dict[str, Tensor]:
    plain = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (8, 8)), nn.AvgPool1d(2), nn.Flatten())
    return posterior(lam.fit(plain, loader(), lam.Laplace(margin=0.7, head="train", dimension=3), progress=False))


class SteadyHead(UncertaintyHead):
    """A head that always normalises by its initial statistics, because a part of a batch has other statistics."""

    def train(self, mode: bool = True) -> "SteadyHead":
        return super().train(False)


def pfe_and_hib(**options: Any) -> dict[str, Tensor]:
    """Weights of both after training, and their variances of images."""
    found: dict[str, Tensor] = {}
    for method in (Pfe(epochs=2), Hib(kl_weight=0.1)):
        name, common = method.name, {"accelerator": "cpu", "progress": False, "batch_size": BATCH, **options}
        result = method.train(network(), Images(), Training(loss=LOSS, epochs=2, **common))
        tensors = {"variance": result.encoder.embed(Images().images).variance, **result.encoder.tensors()}
        found |= {f"{name}.{key}": value for key, value in (tensors | weights(result.encoder.network)).items()}
    return found


def steady_heads(folder: Path) -> dict[str, Tensor]:
    """PFE and HIB, both without the statistics of batches."""
    with patch("lam.methods.head.UncertaintyHead", SteadyHead):
        return pfe_and_hib(optimizer="sgd", learning_rate=0.01)


def views(folder: Path, method: type[ViewsMethod] = Simclr, **options: Any) -> dict[str, Tensor]:
    training: dict[str, Any] = {"optimizer": "sgd", "accelerator": "cpu", "progress": False, "batch_size": BATCH}
    trained, images = network(), Images()
    data = TensorImages(images.images[:42], images.labels[:42])  # every part of a batch has at least two of these
    method(crop_scale=1.0, jitter=0.0, **options).train(trained, data, Training(loss=LOSS, epochs=2, **training))
    return weights(trained)


def views_of_others(folder: Path) -> dict[str, Tensor]:
    options: dict[str, Any] = {"n_prototypes": 8}
    return {
        f"{method.name}.{name}": tensor
        for method, own in ((Simsiam, {}), (Byol, {}), (Swav, options))
        for name, tensor in views(folder, method, **own).items()
    }


ALIKE: tuple[Callable[[Path], dict[str, Tensor]], ...] = (
    views,
    training,
    mined_training,
    ensemble,
    online,
    steady_heads,
    fits,
    fit_structures,
    fit_layers,
    fit_added_layer,
)


# The same on all processes, and no more.


class Interrupted(Step):
    def backward(self, network: nn.Module, loss: Any, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        if batch.epoch == 1:
            raise KeyboardInterrupt
        return super().backward(network, loss, batch, backward)


Interrupted.__name__ = Step.__name__  # a checkpoint names the step that made it


def resumed(folder: Path) -> dict[str, Tensor]:
    """A stopped run with batch norm, dropout and random data ends as an uninterrupted one."""
    whole, stopped, again = noisy_network(), noisy_network(), noisy_network()
    fit(whole, Images(0.1))
    try:
        fit(stopped, Images(0.1), folder=folder, checkpoint_every=1, step=Interrupted())
    except KeyboardInterrupt:
        fit(again, Images(0.1), folder=folder, checkpoint_every=1)
    first, second = weights(whole), weights(again)
    return first | {"same": torch.tensor(all(torch.equal(first[name], second[name]) for name in first))}


def uncertain_heads(folder: Path) -> dict[str, Tensor]:
    """PFE and HIB, both with batch norm."""
    return pfe_and_hib()


def half_precision(folder: Path) -> dict[str, Tensor]:
    trained = network()
    step = OnlineLaplaceStep("head", LaplaceOnline())
    fit(trained, step=step, precision="bf16-mixed", epochs=1)
    assert step.h is not None
    return weights(trained) | {"h": step.h}


def refusals(folder: Path) -> dict[str, Tensor]:
    """Error messages of every process, as bytes."""

    def fail() -> None:
        raise ValueError("the first process cannot write")

    def fail_with_a_file() -> None:
        raise HTTPError("http://images", 404, "no such file", Message(), None)

    class Diverging(Step):
        def backward(self, *arguments: Any) -> Tensor:
            return super().backward(*arguments) * torch.nan

    sampler = DistributedSampler(Images())  # pyright: ignore[reportArgumentType]
    told: dict[str, Tensor] = {}
    for name, refused in {
        "batch": lambda: fit(network(), batch_size=3),
        "first": lambda: distributed.broadcast_from_rank_zero(fail),
        "download": lambda: distributed.broadcast_from_rank_zero(fail_with_a_file),
        "sampler": lambda: fitted(loader(shuffle=False, sampler=sampler)),
        "diverging": lambda: fit(network(), step=Diverging()),
        "empty": lambda: fitted([]),
    }.items():
        try:
            refused()
        except (ValueError, HTTPError, RuntimeError) as error:
            told[name] = torch.tensor(list(str(error).encode()), dtype=torch.uint8)
    return told


SAME_ON_ALL = (views_of_others, resumed, uncertain_heads, half_precision, refusals)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.join()
    for function in (*ALIKE, *SAME_ON_ALL):
        tensors = function(folder / function.__name__)
        write_tensors(folder / f"{function.__name__}-{distributed.rank()}.safetensors", tensors)
    threads = folder / f"threads-{distributed.rank()}.txt"
    distributed.leave()
    threads.write_text("".join(path.read_text() for path in Path("/proc/self/task").glob("*/comm")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

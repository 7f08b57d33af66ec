"""The training loop: deterministic, resumable, with errors if it cannot continue."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lam import losses, models
from lam.methods import Deterministic, LaplaceOnline
from lam.models import EmbeddingNetwork
from lam.pairs.relation import Relation
from lam.training import DivergenceError, History, Minibatch, Step, Training, checkpoints, device_of, train
from tests.helpers import run_python

pytestmark = pytest.mark.usefixtures("one_thread")

LOSS = losses.build("contrastive", margin=0.7)
BATCHES = 3  # an epoch of Images at batch_size 16
COMPARISONS = 2  # readings of a few items, which a checkpoint compares


class Images:
    """40 noisy images of 4 classes, with a random shift at every reading."""

    def __init__(self, size: int = 40, classes: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(size) % classes
        self.images = torch.rand(size, 1, 8, 8, generator=generator) + self.labels[:, None, None, None] / classes
        self.reads: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index] + 0.01 * torch.randn(1), int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        self.reads.append(indices)
        return [self[index] for index in indices]


def network(seed: int = 0) -> EmbeddingNetwork:
    convnet = models.build("convnet8", dimension=3, seed=seed)
    convnet.features.append(nn.BatchNorm1d(512))
    convnet.features.append(nn.Dropout(0.3))
    return convnet


def fit(trained: nn.Module, dataset: Any = None, **options: Any) -> History:
    options = {"loss": LOSS, "epochs": 2, "batch_size": 16, "accelerator": "cpu", "progress": False} | options
    own = {name: options.pop(name) for name in ("step", "method") if name in options}
    return train(trained, Images() if dataset is None else dataset, Training(**options), **own)


def same(first: nn.Module, second: nn.Module) -> bool:
    mine, other = first.state_dict(), second.state_dict()
    return all(torch.equal(mine[name], other[name]) for name in mine)


class Interrupted(Step):
    """Stops a run before its n-th batch, as a user would."""

    def __init__(self, after: int) -> None:
        self.left = after

    def backward(self, network: nn.Module, loss: Any, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().backward(network, loss, batch, backward)


Interrupted.__name__ = Step.__name__  # a checkpoint names the step that made it


class Remembering(Step):
    """A method with a state and its own random numbers: a running mean of the loss at perturbed weights."""

    def __init__(self, scale: float = 0.1) -> None:
        self.scale, self.mean = scale, torch.zeros(())

    @property
    def settings(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def backward(self, network: nn.Module, loss: Any, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        noise = self.scale * torch.randn(network.head.weight.shape, generator=batch.generator)
        with torch.no_grad():
            network.head.weight += noise
        value = super().backward(network, loss, batch, backward)
        with torch.no_grad():
            network.head.weight -= noise
        self.mean = 0.9 * self.mean + 0.1 * value
        return value

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.mean = state["mean"]


def test_training_lowers_the_loss_and_says_what_it_did() -> None:
    trained = network()
    history = fit(trained, epochs=5)
    assert len(history.losses) == len(history.seconds) == 5
    assert history.losses[-1] < history.losses[0]
    assert (history.validation, history.best_epoch, history.batches_without_positives) == ((), 5, 0)
    assert not trained.training


def test_same_seed_same_weights_and_the_global_state_is_untouched() -> None:
    state = torch.get_rng_state()
    first, again, other = network(), network(), network()
    assert fit(first, seed=1).losses == fit(again, seed=1).losses
    fit(other, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, again)
    assert not same(first, other)


class Scaled(nn.Module):
    """A network whose outputs are unit vectors times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = network(), factor

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.factor


@pytest.mark.parametrize("loss", ["log_posterior", "supcon"])
def test_the_length_of_outputs_has_no_effect(loss: str) -> None:
    options: Any = {"loss": losses.build(loss, margin=0.7)}
    plain, scaled = (fit(Scaled(factor), **options).losses for factor in (1.0, 7.0))
    assert scaled == pytest.approx(plain, rel=1e-3)


class Augmented(Images):
    """Images with random changes by Python and NumPy, as in most libraries of augmentations."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        return image * (1 + random.random()) + np.random.rand(), label  # noqa: NPY002


def test_augmentation_by_python_and_numpy_follows_from_the_seed() -> None:
    losses_of = [fit(network(), Augmented(), num_workers=workers).losses for workers in (0, 0, 1)]
    assert losses_of[0] == losses_of[1] == losses_of[2]


def test_every_epoch_reads_every_item_once_in_another_order() -> None:
    data = Images()
    fit(network(), data)
    epochs = [[index for batch in reads for index in batch] for reads in (data.reads[:BATCHES], data.reads[BATCHES:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 2
    assert epochs[0] != epochs[1]


def test_reading_one_by_one_or_in_another_process_gives_the_same_weights() -> None:
    class OneByOne(torch.utils.data.Dataset):
        __len__, __getitem__, labels = Images.__len__, Images.__getitem__, Images().labels
        images = Images().images

    batched, single, elsewhere = network(), network(), network()
    fit(batched)
    fit(single, OneByOne())
    fit(elsewhere, num_workers=1)
    assert same(batched, single)
    assert same(batched, elsewhere)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop", "sgd"])
@pytest.mark.parametrize("after", [1, BATCHES, BATCHES + 2])
def test_a_resumed_run_ends_where_an_uninterrupted_one_ends(tmp_path: Path, optimizer: str, after: int) -> None:
    options = {"optimizer": optimizer, "checkpoint_every": 1, "validate": lambda n: float(n.head.bias[0])}
    whole, stopped, resumed = network(), network(), network(seed=5)
    history = fit(whole, **options)
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, folder=tmp_path, step=Interrupted(after), **options)
    data = Images()
    again = fit(resumed, data, folder=tmp_path, **options)
    assert len(data.reads) == COMPARISONS + 2 * BATCHES - after
    assert same(whole, resumed)
    assert (again.losses, again.validation, again.best_epoch) == (
        history.losses,
        history.validation,
        history.best_epoch,
    )


class Meanwhile(Step):
    """Tries to start another training in the middle of each batch."""

    def __init__(self, other: Callable[[], object]) -> None:
        self.other, self.refused = other, 0

    def backward(self, network: nn.Module, loss: Any, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        with pytest.raises(ValueError, match="is in use"):
            self.other()
        self.refused += 1
        return super().backward(network, loss, batch, backward)


def test_two_trainings_do_not_share_a_folder_of_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "checkpoints"
    step = Meanwhile(lambda: fit(network(1), folder=folder))
    fit(network(), folder=folder, step=step, checkpoint_every=1)
    assert step.refused
    fit(network(), folder=folder, step=step, epochs=3, checkpoint_every=1)  # the folder is free again


def test_float16_is_refused_where_bfloat16_would_replace_it() -> None:
    with pytest.raises(ValueError, match="take bf16-mixed"):
        fit(network(), precision="16-mixed", accelerator="cpu")


def test_a_finished_run_is_not_trained_again_and_may_be_continued(tmp_path: Path) -> None:
    first, again, longer, whole = network(), network(), network(), network()
    history = fit(first, folder=tmp_path, learning_rate_decay=0.9)
    data = Images()
    assert fit(again, data, folder=tmp_path, learning_rate_decay=0.9) == history
    assert len(data.reads) == COMPARISONS
    assert same(first, again)
    fit(longer, folder=tmp_path, learning_rate_decay=0.9, epochs=3)
    fit(whole, learning_rate_decay=0.9, epochs=3)
    assert same(longer, whole)


def test_a_damaged_checkpoint_falls_back_and_ends_the_same(tmp_path: Path) -> None:
    whole, resumed = network(), network()
    fit(whole, folder=tmp_path)
    newest = tmp_path / f"checkpoint-{2 * BATCHES:08d}" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"{newest}.*truncated"):
        fit(resumed, folder=tmp_path)
    assert same(whole, resumed)
    assert checkpoints.load(tmp_path).path == newest.parent


def test_a_step_with_a_state_is_resumed_and_goes_with_the_best_epoch(tmp_path: Path) -> None:
    values = iter([1.0, 2.0, 0.0, 0.0])
    whole, step = network(), Remembering()
    assert fit(whole, step=step, epochs=3, validate=lambda _: next(values)).best_epoch == 2
    stopped, values = Remembering(), iter([1.0, 2.0, 0.0])
    fit(network(), step=stopped, epochs=2, folder=tmp_path, validate=lambda _: next(values))
    resumed, last = network(), Remembering()
    fit(resumed, step=last, epochs=3, folder=tmp_path, validate=lambda _: next(values))
    assert same(whole, resumed)
    assert step.mean == stopped.mean == last.mean > 0


def test_validation_picks_the_first_best_epoch_in_evaluation_mode() -> None:
    values, weights_by_epoch = iter([0.1, 0.4, 0.4]), []

    def validate(validated: nn.Module) -> float:
        assert not validated.training
        assert not torch.is_grad_enabled()
        weights_by_epoch.append(validated.head.weight.clone())
        return next(values)

    trained = network()
    history = fit(trained, epochs=3, validate=validate)
    assert (history.validation, history.best_epoch) == ((0.1, 0.4, 0.4), 2)
    assert torch.equal(trained.head.weight, weights_by_epoch[1])


class Constant(Step):
    """A gradient of one for every parameter."""

    def backward(self, network: nn.Module, loss: Any, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        for parameter in network.parameters():
            parameter.grad = torch.ones_like(parameter)
        return torch.zeros(())


def test_the_learning_rate_decays_by_the_epoch() -> None:
    trained, start = network(), network()
    options = {"learning_rate": 0.1, "learning_rate_decay": 0.5, "weight_decay": 0.0}
    fit(trained, step=Constant(), optimizer="sgd", **options)
    torch.testing.assert_close(trained.head.bias, start.head.bias - BATCHES * 0.1 * (1 + 0.5))


def test_bfloat16_trains_and_keeps_float32_weights() -> None:
    trained = network()
    assert fit(trained, precision="bf16-mixed").losses[0] > 0
    assert trained.head.weight.dtype == torch.float32


@pytest.mark.usefixtures("as_in_production")
def test_settings_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    step = Step()
    step.settings = {"n_samples": np.int64(2)}
    plain = fit(network(), learning_rate=2**-10, seed=1)
    numbers = {"epochs": np.int64(1), "batch_size": np.int32(16), "learning_rate": np.float32(2**-10)}
    fit(network(), **numbers, seed=np.int64(1), checkpoint_every=np.int64(2), step=step, folder=tmp_path)
    step.settings = {"n_samples": 2}
    assert fit(network(), learning_rate=2**-10, seed=1, step=step, folder=tmp_path).losses == plain.losses


@pytest.mark.parametrize(("enabled", "precision"), [(True, "32-true"), (True, "bf16-mixed"), (False, "bf16-mixed")])
def test_within_autocast_the_weights_of_every_step_are_used(enabled: bool, precision: str) -> None:
    """An outer autocast keeps casts of weights until it ends, even casts of a pass without gradients."""
    expected = fit(network(), epochs=5, precision="bf16-mixed").losses
    trained, inputs = network(), Images().images
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            trained.eval()(inputs)
        assert fit(trained, epochs=5, precision=precision).losses == pytest.approx(expected, rel=0.1)
        output = trained(inputs).float()
    torch.testing.assert_close(output, trained(inputs), rtol=0, atol=0.05)


def test_batches_without_positives_are_skipped_and_counted() -> None:
    history = fit(network(), Images(classes=10), batch_size=4)
    assert 0 < history.batches_without_positives < 2 * 10
    assert len(history.losses) == 2


@pytest.mark.parametrize(("labels", "lacking"), [(range(8), "positive"), ([0] * 8, "negative")])
def test_an_epoch_whose_batches_lack_a_kind_of_pair_is_an_error(labels: Any, lacking: str) -> None:
    items = list(zip(Images(size=8, classes=8).images, labels, strict=True))  # training cannot read all labels first
    with pytest.raises(ValueError, match=f"epoch 1.*{lacking}.*batch_size.*4"):
        fit(network(), items, batch_size=4)


def test_a_loss_that_is_not_finite_stops_and_the_last_checkpoint_stands(tmp_path: Path) -> None:
    class Diverging(Step):
        left = 4

        def backward(self, *args: Any) -> Tensor:
            self.left -= 1
            return super().backward(*args) * (1 if self.left >= 0 else torch.nan)

    with pytest.raises(DivergenceError, match="loss.*nan.*epoch 2, step 5.*learning_rate.*checkpoint"):
        fit(network(), step=Diverging(), folder=tmp_path)
    checkpoint = checkpoints.load(tmp_path)
    assert checkpoint.path.name == "checkpoint-00000003"
    assert all(tensor.isfinite().all() for tensor in checkpoint.tensors.values())


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="network/features.0.weight.*epoch 1, step 2"):
        fit(network(), step=Constant(), optimizer="sgd", learning_rate=3e38, folder=tmp_path, checkpoint_every=1)
    assert checkpoints.load(tmp_path).path.name == "checkpoint-00000001"


@pytest.mark.usefixtures("as_in_production")
def test_a_validation_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="validate.*number.*None"):
        fit(network(), validate=lambda trained: None)


def test_a_validation_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(DivergenceError, match="validation.*nan.*epoch 1, step 3"):
        fit(network(), validate=lambda _: float("nan"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.01}, "learning_rate 0.001, now 0.01"),
        ({"seed": 3}, "seed 0, now 3"),
        ({"optimizer": "sgd"}, "optimizer 'adam', now 'sgd'"),
        ({"loss": losses.build("squared", margin=0.7)}, r"loss 'Contrastive\(margin=0.7\)', now 'Squared"),
        ({"method": "mc_dropout"}, "method 'deterministic', now 'mc_dropout'; use"),
        ({"method": None}, "method 'deterministic', now None; use"),
        ({"step": Remembering()}, "step 'Step', now 'Remembering', step_settings {}, now {'scale': 0.1}"),
        ({"validate": lambda _: 0.0}, "validated False, now True"),
        ({"relation": Relation(positive_within=1.0)}, r"pairs 'by label', now .Relation\("),
        ({"dataset": Images(size=44)}, "items 40, now 44, labels"),
        ({"dataset": Images(classes=5)}, "labels '.*', now"),
        ({"epochs": 1}, "epoch 3.*epochs=1"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    common = {"folder": tmp_path, "method": "deterministic"}
    fit(network(), **common)
    with pytest.raises(ValueError, match=message):
        fit(network(), **common | options)
    assert fit(network(), **common).best_epoch == 2


class Places(Images):
    """The images at places 30 metres apart, two at each."""

    def __init__(self, step: float = 30.0) -> None:
        super().__init__()
        self.targets = torch.arange(40)[:, None] // 2 * torch.tensor([[step, 0.0]])

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], self.targets[index]


class Attraction(losses.Loss):
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def _compute(self, embeddings: Tensor, pairs: Any) -> Tensor:
        return -(self.scale * pairs.positive * (embeddings @ embeddings.T)).mean()


class AttractionBy(Attraction):
    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.by = lambda cosines: cosines  # another function in each process


class TrainableAttraction(losses.TrainableLoss):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.shift = scale, torch.nn.Parameter(torch.zeros(3))

    def _compute(self, embeddings: Tensor, pairs: Any) -> Tensor:
        return Attraction(self.scale)(embeddings + self.shift, pairs)


@pytest.mark.parametrize("kind", [Attraction, AttractionBy, TrainableAttraction])
def test_a_loss_of_ones_own_is_resumed_unless_its_settings_changed(tmp_path: Path, kind: Any) -> None:
    first, same_settings = kind(1.0), kind(1.0)
    fit(network(), loss=first, epochs=1, folder=tmp_path)
    assert len(fit(network(), loss=same_settings, folder=tmp_path).losses) == 2
    with pytest.raises(ValueError, match=rf"other settings: loss '{kind.__name__}\([^']*scale=1.0"):
        fit(network(), loss=kind(2.0), folder=tmp_path)


class Detached(losses.Loss):
    def _compute(self, embeddings: Tensor, pairs: Any) -> Tensor:
        return torch.tensor(embeddings.sum().item())


def test_a_loss_without_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="loss.*no gradient.*network's output"):
        fit(network(), loss=Detached())


class ModuleLoss(Attraction, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("loss", [Attraction(nn.Parameter(torch.ones(()))), Attraction(nn.Linear(3, 3)), ModuleLoss()])
def test_parameters_of_a_loss_that_is_not_trainable_are_refused(loss: Any) -> None:
    with pytest.raises(ValueError, match="has parameters.*TrainableLoss"):
        Training(loss=loss, epochs=1)


def test_frozen_modules_of_a_loss_are_taken() -> None:
    Training(loss=Attraction(nn.Linear(3, 3).requires_grad_(False)), epochs=1)


class Unrepeatable(Images):
    """Images with noise that does not follow from the seed."""

    generator = torch.Generator()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index] + 0.01 * torch.randn(1, generator=self.generator), int(self.labels[index])


@pytest.mark.parametrize("kind", [Images, list, Unrepeatable])
def test_a_checkpoint_is_resumed_on_its_own_data_only(tmp_path: Path, kind: Any) -> None:
    def data() -> Any:
        return list(zip(Images().images, Images().labels, strict=True)) if kind is list else kind()

    fit(network(), data(), folder=tmp_path, epochs=1)
    assert len(fit(network(), data(), folder=tmp_path, epochs=2).losses) == 2
    if kind is not Unrepeatable:
        images = Images()
        others = list(zip(images.images.flip(0), images.labels.flip(0), strict=True))
        other = others if kind is list else Images()
        if kind is Images:
            other.images = images.images + 1
        with pytest.raises(ValueError, match="has other settings"):
            fit(network(), other, folder=tmp_path, epochs=2)


def test_other_distances_and_other_places_are_refused(tmp_path: Path) -> None:
    near = Relation(positive_within=10.0, negative_beyond=25.0)
    options = {"folder": tmp_path, "epochs": 1, "batch_size": 40}
    fit(network(), Places(), relation=near, **options)
    fit(network(), Places(), relation=Relation(positive_within=10.0, negative_beyond=25.0), **options)
    wide = Relation(positive_within=20.0, negative_beyond=25.0)
    with pytest.raises(ValueError, match=r'pairs "Relation\(.*=10.0, .*", now "Relation\(.*=20.0, .*"; use'):
        fit(network(), Places(), relation=wide, **options)
    with pytest.raises(ValueError, match="settings: targets '.*', now '.*'; use"):
        fit(network(), Places(31.0), relation=near, **options)


def test_another_network_is_refused(tmp_path: Path) -> None:
    fit(network(), folder=tmp_path)
    with pytest.raises(ValueError, match="network 'EmbeddingNetwork of shapes"):
        fit(models.build("convnet8", dimension=4), folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs.*1.*0"),
        ({"batch_size": 1}, "batch_size.*2, got 1"),
        ({"seed": -1}, "seed.*0.*-1"),
        ({"weight_decay": float("nan")}, "weight_decay.*0.*nan"),
        ({"weight_decay": float("inf")}, "weight_decay.*0.*inf"),
        ({"num_workers": -1}, "num_workers.*0.*-1"),
        ({"checkpoint_every": 0}, "checkpoint_every.*1.*0"),
        ({"learning_rate": 0.0}, "learning_rate.*got 0.0"),
        ({"learning_rate_decay": 1.5}, r"learning_rate_decay.*\(0, 1\].*1.5"),
        ({"per_class": 1}, "per_class.*2, got 1"),
        ({"per_class": 5}, "batch_size.*per_class=5 times.*16.*15.*per_class"),
        ({"per_class": 16}, "batch_size.*per_class=16 times.*16.*32"),
        ({"per_class": 2}, "batch_size / per_class = 8 classes, .* got 4:"),
        ({"max_pairs": 0}, "max_pairs.*1.*0"),
        ({"devices": 2}, "devices.*got 2"),
        ({"dataset": Images(size=1)}, "dataset.*2 items, got 1"),
        ({"dataset": Images(classes=1)}, "40 items.*no negative pair"),
        ({"dataset": Images(classes=40)}, "40 items.*no positive pair"),
    ],
)
def test_bad_options_and_data(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(network(), **options)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("option", ["optimizer", "precision", "accelerator"])
def test_unknown_choices_list_the_allowed(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}.*'best'"):
        Training(loss=LOSS, epochs=1, **{option: "best"})


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("loss", [nn.TripletMarginLoss(), "contrastive", losses.Contrastive])
def test_a_loss_that_is_no_loss_of_lam_is_refused(loss: Any) -> None:
    with pytest.raises(ValueError, match="loss of lam.losses, .*lam.losses.PytorchMetricLearning"):
        Training(loss=loss, epochs=1)


@pytest.mark.usefixtures("as_in_production")
def test_auto_is_never_an_accelerator_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="accelerator cuda.*auto or cpu"):
        device_of("cuda")
    with pytest.raises(ValueError, match="accelerator.*auto, cpu, cuda.*'mps'"):
        device_of("mps")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_auto_is_cuda_where_there_is_some() -> None:
    assert device_of("auto").type == "cuda"


def test_items_may_hold_more_than_an_input_and_a_label() -> None:
    trained, other = network(), network()
    pairs = [Images()[index] for index in range(40)]
    fit(trained, pairs)
    fit(other, [(*pair, "path.jpg") for pair in pairs])
    assert same(trained, other)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([{"image": 0, "label": 1}] * 4, r"\(input, label\), got dict of image, label"),
        ([torch.zeros(1, 8, 8)] * 4, r"\(input, label\), got Tensor"),
        ([(torch.zeros(1, 8, 8), "cat")] * 4, "labels.*'cat'.*classes"),
    ],
)
def test_items_without_an_input_and_a_number_are_refused(dataset: Any, message: str) -> None:
    for method in (Deterministic(), LaplaceOnline(likelihood_scale=1.0)):
        with pytest.raises(ValueError, match=message):
            method.train(network(), dataset, Training(loss=LOSS, epochs=1, progress=False))


def test_labels_that_are_texts_are_refused() -> None:
    images = Images()
    images.labels = ["cat", "dog"] * 20  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="labels.*'cat'.*classes"):
        fit(network(), images)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Tensor.double, "inputs.*torch.float64.*weights.*torch.float32"),
        (lambda image: image.expand(3, 8, 8), r"inputs.*\(16, 3, 8, 8\).*\(N, C, H, W\)"),
    ],
)
def test_inputs_that_the_network_does_not_take_are_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(network(), [(change(image), label) for image, label in map(Images().__getitem__, range(40))])


def test_outputs_that_are_no_embeddings_are_refused() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(inputs), self.body.features(inputs)

    with pytest.raises(
        ValueError, match=r"got tuple: wrap .* self.network\(inputs\)\[0\] or self.network\(inputs\)\[1\]"
    ):
        fit(TwoHeads())


def test_labels_of_another_length_are_refused() -> None:
    data = Images()
    data.labels = data.labels[:-1]
    with pytest.raises(ValueError, match="dataset has 40 items, but 39 labels"):
        fit(network(), data)


def test_progress_goes_to_stderr_or_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    fit(network(), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "epoch 2/2" in shown.err
    fit(network(), progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.long
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_the_same(tmp_path: Path, kills: int) -> None:
    ended = run_python("-m", "tests.training.kill_training", tmp_path, kills, 0, timeout=250)
    assert ended.stdout == f"{kills} kills, same end\n"

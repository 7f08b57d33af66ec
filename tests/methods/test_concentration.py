"""Methods that learn κ by losses on distributions: the phases of training, the learned κ, and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lam
from lam.datasets import TensorImages
from lam.encoders.deterministic import NormEncoder
from lam.losses import MCInfoNCE, SupCon, build
from lam.methods import Aninfonce, Elk, HibVmf, LossPrediction, Mcinfonce, Method, Varcon
from lam.models.kappa_head import KappaHead
from lam.pairs import Pairs
from tests.methods import small_data as small


def weights(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def ambiguous(n: int = 240) -> tuple[TensorImages, Tensor]:
    """Images of four patterns, and which are covered: a quarter of the images, in which no pattern is visible."""
    clear, is_covered = small.images(n, noise=0.05), torch.arange(n) % 16 >= 12
    return TensorImages(clear.images * ~is_covered[:, None, None, None], clear.labels), is_covered


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        Mcinfonce(n_samples=4, kappa_pos=10.0, epochs=12, learning_rate=3e-3),
        Mcinfonce(n_samples=4, kappa_pos=10.0, kappa="shared"),
        Elk(kappa_pos=1.0),
    ],
    ids=["mcinfonce", "mcinfonce-shared", "elk"],
)
def test_ambiguous_images_get_the_smaller_concentration(method: Method) -> None:
    data, is_covered = ambiguous()
    training = small.training(epochs=10, batch_size=48, learning_rate=3e-3)
    kappa = method.train(small.network(), data, training).encoder.embed(data.images).kappa
    assert kappa[is_covered].median() < kappa[~is_covered].median()


@pytest.mark.long
def test_loss_prediction_says_what_the_loss_of_either_kind_is() -> None:
    data, is_covered = ambiguous()
    training = small.training(epochs=10, batch_size=48, learning_rate=3e-3)
    encoder = LossPrediction(epochs=40, learning_rate=3e-3).train(small.network(), data, training).encoder
    embeddings, losses = encoder.embed(data.images), torch.zeros(len(data.images))
    for batch in torch.randperm(240, generator=torch.Generator().manual_seed(0)).split(48):
        losses[batch], _ = SupCon(2.0, 0.1).of_anchors(embeddings.mean[batch], Pairs.by_label(data.labels[batch]))
    for kind in (is_covered, ~is_covered):
        torch.testing.assert_close((1 / embeddings.kappa[kind]).mean(), losses[kind].mean(), rtol=0.15, atol=0.0)


def test_in_phases_the_network_is_kept_while_the_head_learns() -> None:
    network = small.network()
    before = weights(network)
    encoder, histories = Mcinfonce(n_samples=2, epochs=2).train(
        network, small.images(), small.training(pretrained=True)
    )
    assert list(histories) == ["head"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert encoder.embed(small.images().images).kappa.unique().numel() > 1


@pytest.mark.parametrize("method", [Mcinfonce, Elk, HibVmf])
def test_kappa_from_the_length_of_the_embedding_needs_no_head(method: Any) -> None:
    network = small.network()
    before = weights(network)
    encoder, histories = method(kappa="norm").train(network, small.images(), small.training())
    assert type(encoder) is NormEncoder
    assert list(histories) == ["network"]
    assert not torch.equal(network.head.weight, before["head.weight"])


def test_a_shared_head_shapes_the_network_and_one_in_phases_does_not() -> None:
    def trained(kappa: Any) -> Tensor:
        network = small.network()
        method = Mcinfonce(kappa=kappa, n_samples=2, epochs=1)
        method.train(network, small.images(), small.training(optimizer="sgd", learning_rate=0.1))
        return network.head.weight.detach()

    assert not torch.equal(trained("shared"), trained("phases"))


def test_what_the_loss_learned_of_kappa_pos_is_in_the_history_and_in_its_curvature() -> None:
    method = Mcinfonce(n_samples=2, epochs=1, learn_kappa_pos=True)
    _, histories = method.train(small.network(), small.images(), small.training(learning_rate=0.1))
    learned = histories["network"].learned
    assert learned["kappa_pos"] != [pytest.approx(20.0)]
    own = method.trained_by(small.TRAINING["loss"], 3, learned)
    assert own == MCInfoNCE(learned["kappa_pos"][0]).curvature(3, method.start)
    _, histories = Mcinfonce(n_samples=2, epochs=1).train(small.network(), small.images(), small.training())
    assert histories["network"].learned == {}


def test_what_a_loss_learns_is_in_the_history() -> None:
    _, histories = Varcon().train(small.network(), small.images(), small.training())
    assert histories["network"].learned["epsilon"] != [pytest.approx(0.02, abs=1e-9)]
    _, histories = Aninfonce().train(small.network(), small.images(), small.training())
    assert len(histories["network"].learned["concentration"]) == 3


def test_a_posterior_stands_over_a_network_that_these_trained() -> None:
    data = small.images()
    for method in (Varcon(), Aninfonce(), Mcinfonce(n_samples=2, epochs=1)):
        network = small.network()
        method.train(network, data, small.training())
        fitted = lam.fit(network, small.batches(data), margin=0.7, progress=False)
        assert fitted.embed(data.images, n_samples=4).kappa.isfinite().all()


def test_the_head_resumes_only_beside_the_network_that_it_began_with(tmp_path: Path) -> None:
    method, data = Mcinfonce(n_samples=2, epochs=1), small.images()
    method.train(small.network(), data, small.training(folder=tmp_path, pretrained=True))
    with pytest.raises(ValueError, match="has other settings"):
        method.train(small.network(seed=5), data, small.training(folder=tmp_path, pretrained=True))


def test_the_head_may_train_for_more_epochs(tmp_path: Path) -> None:
    data, plan = small.images(), small.training(folder=tmp_path)
    for epochs in (1, 2):
        _, histories = Mcinfonce(n_samples=2, epochs=epochs).train(small.network(), data, plan)
        assert len(histories["head"].losses) == epochs


@pytest.mark.parametrize("form", ["exp", "softplus", "inverse"])
@pytest.mark.parametrize("start", [1.5, 20.0, 500.0])
def test_the_head_begins_at_its_start_and_never_gives_nan(form: Any, start: float) -> None:
    head = KappaHead(5, start=start, form=form)
    torch.testing.assert_close(head(torch.zeros(2, 5)), torch.full((2,), start), rtol=1e-4, atol=1e-4)
    for size in (1e4, -1e4):
        features = torch.full((1, 5), size, requires_grad=True)
        kappa = head(features)
        kappa.sum().backward()
        assert kappa.isfinite().all()
        assert (kappa >= 0).all()
        assert features.grad is not None
        assert features.grad.isfinite().all()


def test_features_that_a_head_cannot_take_are_refused() -> None:
    for make, message in (
        (lambda: KappaHead(0), "features.*1.*0"),
        (lambda: KappaHead(3)(torch.zeros(2, 4)), r"features.*\(N, 3\).*\(2, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_varcon_learns_from_mined_items_and_none_are_the_same_as_all() -> None:
    def trained(**options: Any) -> Tensor:
        network = small.network()
        Varcon().train(network, small.images(), small.training(loss=build(margin=0.5), **options))
        return network.head.weight.detach()

    assert not torch.equal(trained(miner="hard"), trained())
    assert not torch.equal(trained(max_pairs=2), trained())
    assert torch.equal(trained(max_pairs=1000), trained())


def test_a_step_by_varcon_forms_no_matrix_of_pairs() -> None:
    shapes: set[tuple[int, ...]] = set()

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            shapes.update(tuple(tensor.shape) for tensor in tree_leaves(output) if isinstance(tensor, Tensor))
            return output

    def n_of_pairs(method: Method) -> int:
        shapes.clear()
        with Recorded():
            method.train(small.network(), small.images(37), small.training(batch_size=37))
        return sum(shape.count(37) > 1 for shape in shapes)

    assert n_of_pairs(Varcon()) == 0
    assert n_of_pairs(Aninfonce()) > 0


def test_the_margin_of_the_training_loss_is_kept_for_miners_and_posteriors() -> None:
    for method in (Varcon(), Aninfonce()):
        assert method.training_loss(SupCon(0.5), 3).margin == 0.5
    assert build("varcon", margin=0.5).margin == 0.5  # pyright: ignore [reportAttributeAccessIssue]
    assert SupCon(0.5).margin == 0.5

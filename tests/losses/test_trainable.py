"""VarCon and AnInfoNCE against slow loops in float64, at their limits and at the edges; and their training."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lam.losses import AnInfoNCE, InfoNCE, TrainableLoss, VarCon, build
from lam.pairs import Pairs
from lam.training import Training, train
from tests.losses.test_losses import PAIRS, infonce_by_loop, unit
from tests.methods import small_data as small

LABELS = torch.tensor([0, 0, 1, 1, 1, 2])


def varcon_by_loop(z: Tensor, labels: list[int], temperature: float, epsilon: Tensor) -> Tensor:
    """Item by item and class by class, from equations 7 to 13."""
    classes = sorted(set(labels))
    means = {c: torch.stack([z[i] for i in range(len(z)) if labels[i] == c]).mean(0).detach() for c in classes}
    terms = []
    for i in range(len(z)):
        weights = {c: (z[i] @ (means[c] / means[c].norm()) / temperature).exp() for c in classes}
        p = {c: weight / sum(weights.values()) for c, weight in weights.items()}
        own = labels[i]
        softened = temperature - epsilon + 2 * epsilon * p[own]
        unscaled = {c: 1 + ((1 / softened).exp() - 1) * (c == own) for c in classes}
        q = {c: value / sum(unscaled.values()) for c, value in unscaled.items()}
        terms.append(sum(q[c] * (q[c] / p[c]).log() for c in classes) - p[own].log())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("epsilon", [-0.3, 0.0, 0.2])
def test_varcon_and_its_gradients_equal_the_loop(epsilon: float) -> None:
    raw = (3 * unit(6, 4)).requires_grad_()
    loss, z = VarCon(0.5, epsilon).double(), F.normalize(raw)
    value = loss(z, Pairs.by_label(LABELS))
    expected = varcon_by_loop(z, LABELS.tolist(), 0.5, loss.epsilon)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    gradients = torch.autograd.grad(value, [raw, loss.raw], retain_graph=True)
    for gradient, slow in zip(gradients, torch.autograd.grad(expected, [raw, loss.raw]), strict=True):
        torch.testing.assert_close(gradient, slow, rtol=1e-8, atol=1e-10)


def test_varcon_of_mined_pairs_is_the_mean_over_the_items_in_them() -> None:
    z, loss = unit(6, 4), VarCon(0.5, 0.1).double()
    positive, negative = torch.zeros(6, 6), torch.zeros(6, 6)
    positive[0, 1] = positive[1, 0] = negative[1, 3] = negative[3, 1] = 0.5
    mined = Pairs(positive, negative, 1, 1, LABELS)
    assert mined.paired.tolist() == [True, True, False, True, False, False]
    whole = VarCon(0.5, 0.1).double()
    alone = (Pairs(torch.zeros(6, 6), torch.eye(6)[i].diag(), 1, 1, LABELS) for i in (0, 1, 3))
    each = torch.stack([whole(z, pairs) for pairs in alone])
    torch.testing.assert_close(loss(z, mined), each.mean())
    nothing = Pairs(torch.zeros(6, 6), negative, 1, 1, LABELS)
    torch.testing.assert_close(loss(z, nothing), each[1:].mean())
    assert loss(z, Pairs(torch.zeros(6, 6), torch.zeros(6, 6), 1, 1, LABELS)) == 0


@pytest.mark.parametrize("labels", [[0, 1, 2, 2], [0, 0, 0, 0], [1, 1, 2, 2]])
@pytest.mark.parametrize("temperature", [1e-3, 0.1, 10.0])
def test_varcon_is_finite_with_classes_of_one_item_or_one_class_and_where_a_mean_vanishes(
    labels: list[int], temperature: float
) -> None:
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], requires_grad=True)
    for share in (-0.999, 0.5, 0.999):
        loss = VarCon(temperature, share * temperature)
        value = loss(z, Pairs.by_label(torch.tensor(labels)))
        gradients = torch.autograd.grad(value, [z, loss.raw], allow_unused=True)
        assert value.isfinite()
        assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)


def test_classes_without_items_in_a_batch_do_not_count() -> None:
    z, loss = unit(6, 4), VarCon(0.3, 0.1)
    one, other = (loss(z, Pairs.by_label(labels)) for labels in (1000 * LABELS + 7, LABELS))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_epsilon_is_learned_within_the_temperature_or_stays() -> None:
    loss, z = VarCon(0.1, 0.02), unit(6, 4)
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e4)
    for _ in range(5):
        optimizer.zero_grad()
        loss(z, Pairs.by_label(LABELS)).backward()
        optimizer.step()
    assert loss.epsilon.item() != pytest.approx(0.02)
    assert abs(loss.epsilon.item()) <= 0.1 + 1e-8
    assert loss.learned() == {"epsilon": [loss.epsilon.item()]}
    assert not any(parameter.requires_grad for parameter in VarCon(learn=False).parameters())


def anisotropic(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([torch.stack([-(weight * (a - b) ** 2).sum() for b in x]) for a in x])


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind != "no positives"])
def test_aninfonce_and_its_gradients_equal_the_loop_with_and_without_normalisation(kind: str) -> None:
    for rows in (unit(6, 4), 2 * unit(6, 4) + 1):
        x, negatives = rows.requires_grad_(), torch.tensor([0.1, 0.0, 0.4, 2.0], dtype=torch.float64)
        loss = AnInfoNCE(4, negatives=negatives).double()
        with torch.no_grad():
            loss.log_concentration.copy_(torch.tensor([[-1.0, 0.0, 0.5, 1.0]]))
        value = loss(x, PAIRS[kind])
        expected = infonce_by_loop(anisotropic(x, loss.concentration[0] - loss.get_buffer("negatives")), PAIRS[kind])
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
        gradients = torch.autograd.grad(value, [x, loss.log_concentration], retain_graph=True)
        for gradient, slow in zip(gradients, torch.autograd.grad(expected, [x, loss.log_concentration]), strict=True):
            torch.testing.assert_close(gradient, slow, rtol=1e-8, atol=1e-10)


def test_aninfonce_is_infonce_on_the_sphere_where_all_weights_are_one() -> None:
    x, pairs = unit(6, 4), PAIRS["labels"]
    expected = InfoNCE(0.7, temperature=0.25)(x, pairs)
    torch.testing.assert_close(AnInfoNCE(4, 1 / (2 * 0.25))(x, pairs), expected, rtol=1e-6, atol=1e-9)
    assert build("aninfonce", margin=0.5, temperature=0.25, dimension=4).learned() == {
        "concentration": [pytest.approx(2.0)] * 4
    }


def test_an_ensemble_is_the_sum_over_its_members() -> None:
    x, pairs = unit(6, 4), [PAIRS["labels"], Pairs.by_label(torch.tensor([0, 1, 0, 1, 2, 2]))]
    ensemble, member = AnInfoNCE(4, n_members=2), AnInfoNCE(4)
    torch.testing.assert_close(ensemble.of_members(x, pairs), member(x, pairs[0]) + member(x, pairs[1]))


@pytest.mark.usefixtures("as_in_production")
def test_what_cannot_be_is_refused() -> None:
    for loss, message in (
        (lambda: VarCon(0.0), "temperature.*positive.*0"),
        (lambda: VarCon(0.1, 0.1), "epsilon.*±temperature, 0.1.*0.1"),
        (lambda: VarCon(0.1, margin=3.0), r"margin.*\(0, 2\]"),
        (lambda: AnInfoNCE(3, 0.0), "concentration.*positive.*0"),
        (lambda: AnInfoNCE(3, math.inf), "concentration.*inf"),
        (
            lambda: AnInfoNCE(4, torch.tensor([1.0, 2.0, 3.0, 4.0])),  # pyright: ignore [reportArgumentType]
            r"concentration.*tensor\(\[1., 2., 3., 4.\]\)",
        ),
        (lambda: AnInfoNCE(4, 1.0, negatives=2 * torch.ones(4)), r"negatives.*1.*\[2.0, 2.0, 2.0, 2.0\]"),
        (lambda: AnInfoNCE(0), "dimension.*1.*0"),
        (lambda: AnInfoNCE(3, n_members=0), "n_members.*1.*0"),
        (lambda: AnInfoNCE(3, negatives=-torch.ones(3)), "negatives.*3.*0"),
        (lambda: AnInfoNCE(3, negatives=torch.ones(2)), "negatives.*3.*0"),
        (lambda: build("aninfonce", margin=0.7), "give dimension=D"),
    ):
        with pytest.raises(ValueError, match=message):
            loss()
    x, pairs = unit(6, 4), PAIRS["labels"]
    with pytest.raises(ValueError, match="varcon needs classes"):
        VarCon()(x, PAIRS["tuples"])
    with pytest.raises(ValueError, match="embeddings.*3 dimensions.*4"):
        AnInfoNCE(3)(x, pairs)
    with pytest.raises(ValueError, match="pairs.*2 members.*1"):
        AnInfoNCE(4, n_members=2)(x, pairs)


@pytest.mark.parametrize("loss", [VarCon(margin=0.7), AnInfoNCE(3)], ids=["varcon", "aninfonce"])
def test_training_learns_a_copy_and_resumes_to_the_bit(loss: TrainableLoss, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in loss.state_dict().items()}

    def run(**options: object) -> tuple[dict[str, list[float]], Tensor]:
        network = small.network()
        history = train(network, small.images(), Training(**(small.TRAINING | {"loss": loss, "epochs": 2} | options)))
        return history.learned, network.head.weight

    learned, weight = run()
    assert learned == run()[0] != loss.learned()
    assert all(torch.equal(tensor, before[name]) for name, tensor in loss.state_dict().items())
    run(folder=tmp_path, epochs=1)
    resumed, weight_resumed = run(folder=tmp_path)
    assert resumed == learned
    assert torch.equal(weight_resumed, weight)

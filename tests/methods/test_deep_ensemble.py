from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from scipy.linalg import orthogonal_procrustes
from torch import nn

import lam
from lam import models
from lam.encoders.ensemble import EnsembleEncoder, align, concatenated
from lam.methods import DeepEnsemble, Deterministic
from lam.vmf.bessel import bessel_ratio
from lam.vmf.embeddings import mean_resultant_length
from tests.helpers import unchecked
from tests.methods import small_data as small

DATA = small.images()
TEST = small.images(20, seed=3)


@pytest.fixture(scope="module")
def encoder() -> EnsembleEncoder:
    method = DeepEnsemble(n_members=3, reference=40)
    encoder = method.train(small.network(seed=7), DATA, small.training(seed=7)).encoder
    assert isinstance(encoder, EnsembleEncoder)
    return encoder


def units_of(encoder: EnsembleEncoder, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([member(images) for member in encoder.members])


def random_units(*shape: int) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def test_members_are_what_training_from_each_seed_gives(encoder: EnsembleEncoder):
    for number, member in enumerate(encoder.members):
        alone = small.network(seed=7 + number)
        Deterministic().train(alone, DATA, small.training(seed=7 + number))
        for name, tensor in alone.state_dict().items():
            assert torch.equal(tensor, member.state_dict()[name])


def test_the_cosine_of_embeddings_is_the_mean_of_the_members_cosines(encoder: EnsembleEncoder):
    mean = encoder.embed(TEST.images).mean
    assert mean.shape == (20, 9)
    assert encoder.dimension == 9
    torch.testing.assert_close(mean.norm(dim=1), torch.ones(20))
    units = units_of(encoder, TEST.images)
    torch.testing.assert_close(mean @ mean.T, (units @ units.mT).mean(0))


def test_kappa_is_that_of_the_aligned_members(encoder: EnsembleEncoder):
    prediction = encoder.predict(TEST.images, joint=True)
    aligned = units_of(encoder, TEST.images) @ encoder.rotations
    torch.testing.assert_close(prediction.samples, aligned)
    expected = mean_resultant_length(F.normalize(aligned, dim=-1), unbiased=True)
    torch.testing.assert_close(prediction.embeddings.kappa, expected.kappa().clamp(min=1e-6).float(), rtol=1e-3, atol=0)
    torch.testing.assert_close(prediction.embeddings.resultant, expected.resultant.float())
    torch.testing.assert_close(prediction.embeddings.variance, 1 - aligned.mean(0).square().sum(1))
    with torch.no_grad():
        torch.testing.assert_close(prediction.features, encoder.members[0].features(TEST.images))


def test_two_members_are_aligned_as_by_scipy():
    units = random_units(2, 60, 4)
    expected, _ = orthogonal_procrustes(units[1].numpy(), units[0].numpy())
    first, second = align(units)
    torch.testing.assert_close(second @ first.T, torch.from_numpy(expected))


def test_turned_and_mirrored_spheres_come_together_whichever_is_first():
    sphere = random_units(80, 5)
    turns = torch.linalg.qr(torch.randn(4, 5, 5, dtype=torch.float64)).Q
    turns[2] = turns[2].flip(0)
    rotations = align(sphere @ turns)
    torch.testing.assert_close(rotations @ rotations.mT, torch.eye(5, dtype=torch.float64).expand(4, 5, 5))
    aligned = sphere @ turns @ rotations
    torch.testing.assert_close(aligned, aligned[:1].expand_as(aligned))
    assert align((sphere @ turns).float()).dtype == torch.float32


def test_no_other_rotation_of_a_member_brings_it_closer_to_the_rest():
    sphere = random_units(80, 3)
    units = F.normalize(sphere + 0.5 * torch.randn(4, 80, 3, dtype=torch.float64), dim=-1)
    aligned = units @ align(units)
    for number, member in enumerate(aligned):
        rest = (aligned.sum(0) - member) / 3
        turned = member @ torch.from_numpy(orthogonal_procrustes(member.numpy(), rest.numpy())[0])
        assert (turned - rest).square().sum() > (1 - 1e-4) * (member - rest).square().sum(), number


def test_disagreement_and_not_rotation_makes_an_item_uncertain():
    sphere = random_units(80, 3)
    units = torch.stack([sphere @ turn for turn in torch.linalg.qr(torch.randn(5, 3, 3, dtype=torch.float64)).Q])
    units[:, 0] = random_units(5, 3)
    networks = [nn.Linear(3, 3, bias=False).double() for _ in units]
    encoder = EnsembleEncoder(networks, "", rotations=align(units))
    aligned = mean_resultant_length(units @ encoder.rotations, unbiased=True).resultant
    assert aligned[0] < aligned[1:].min()


def test_the_papers_mean_takes_directions_as_they_are(encoder: EnsembleEncoder):
    plain = EnsembleEncoder(encoder.members, "head", rotations=None, combine="mean")
    prediction = plain.predict(TEST.images, joint=True)
    units = units_of(encoder, TEST.images)
    assert plain.dimension == 3
    torch.testing.assert_close(prediction.embeddings.mean, F.normalize(units.mean(0)))
    torch.testing.assert_close(prediction.samples, units)
    encoder = DeepEnsemble(n_members=2, combine="mean").train(small.network(), DATA, small.training()).encoder
    assert encoder.rotations is None


def test_the_papers_mean_is_read_back_without_rotations_and_evaluated(encoder: EnsembleEncoder, tmp_path: Path):
    plain = EnsembleEncoder(encoder.members, "head", rotations=None, combine="mean")
    plain.save(tmp_path)
    loaded = lam.load(tmp_path)
    assert isinstance(loaded, EnsembleEncoder)
    assert loaded.rotations is None
    assert torch.equal(loaded.embed(TEST.images).mean, plain.embed(TEST.images).mean)
    metrics = lam.evaluate(loaded, small.batches(TEST), [small.outside()]).metrics
    assert 0 <= metrics["ece"] <= 1
    assert 0 <= metrics["auroc"] <= 1


def test_each_member_has_its_stage_its_folder_and_its_history(tmp_path: Path):
    stages = []

    @contextmanager
    def stage(name: str):
        stages.append(name)
        yield

    training = small.training(folder=tmp_path, stage=stage)
    histories = DeepEnsemble(n_members=2).train(small.network(), DATA, training).histories
    assert stages == ["member-1", "member-2", "align"]
    assert list(histories) == ["member-1", "member-2"]
    assert all(any((tmp_path / name).iterdir()) for name in histories)


def test_trained_members_are_read_from_files(encoder: EnsembleEncoder, tmp_path: Path):
    files = [str(tmp_path / f"{number}.safetensors") for number in range(3)]
    for member, file in zip(encoder.members, files, strict=True):
        save_file(member.state_dict(), file)
    method = DeepEnsemble(n_members=3, checkpoints=files, reference=40)
    trained = method.train(small.network(), DATA, small.training(seed=7))
    assert trained.histories == {}
    assert torch.equal(trained.encoder.embed(TEST.images).kappa, encoder.embed(TEST.images).kappa)


def test_a_network_of_ones_own_comes_with_what_makes_the_others():
    seeds = []

    def own(width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, width))

    def another(seed: int) -> nn.Module:
        seeds.append(seed)
        return own()

    method = DeepEnsemble(n_members=3)
    ensemble = method.train(own(), DATA, small.training(another=another, seed=4)).encoder
    assert (ensemble.dimension, seeds) == (12, [5, 6])
    with pytest.raises(ValueError, match=r"this network .*Training\(another=...\)"):
        method.train(own(), DATA, small.training())
    with pytest.raises(ValueError, match=r"member 1 has 3 \(16 -> 4\), member 3 has 3 \(16 -> 5\)"):
        method.train(own(), DATA, small.training(another=lambda seed: own(3 + seed)))
    one = own()
    with pytest.raises(ValueError, match="new network.*seed"):
        method.train(own(), DATA, small.training(another=lambda _: one))


def test_what_makes_no_ensemble_is_refused():
    with pytest.raises(ValueError, match="one trained network.*5 files"):
        DeepEnsemble().train(small.network(), DATA, small.training(pretrained=True))
    with pytest.raises(ValueError, match="one trained network.*2 files"):
        DeepEnsemble(n_members=2, checkpoints=["a.pth", "b.pth"]).check_start(pretrained=True)
    with pytest.raises(ValueError, match="combine.*concatenate, mean.*'median'"):
        unchecked(DeepEnsemble.__init__)(object.__new__(DeepEnsemble), combine="median")
    with pytest.raises(ValueError, match="members.*2.*1"):
        EnsembleEncoder([nn.Linear(3, 3)], "", rotations=None)
    with pytest.raises(ValueError, match=r"rotations.*\(2, 3, 3\).*\(2, 4, 4\)"):
        EnsembleEncoder([nn.Linear(3, 3), nn.Linear(3, 3)], "", rotations=torch.zeros(2, 4, 4))


def test_concatenation_is_item_by_item():
    units = random_units(2, 3, 4)
    expected = torch.stack([torch.cat([units[0, i], units[1, i]]) for i in range(3)]) / 2**0.5
    torch.testing.assert_close(concatenated(units), expected)
    assert models.build("convnet8", dimension=3).recipe  # members are rebuilt by it


def test_kappa_is_of_the_sphere_of_the_members() -> None:
    members = [models.build("convnet8", dimension=3, seed=seed) for seed in range(2)]
    rotations = torch.eye(3).expand(2, -1, -1).clone()
    encoder = EnsembleEncoder(members, "head", rotations=rotations, combine="concatenate")
    assert (encoder.dimension, encoder.kappa_dimension) == (6, 3)


def test_the_combined_kappa_takes_the_epistemic_part_from_the_sphere_of_the_members() -> None:
    encoder, inputs = EnsembleEncoder([nn.Linear(4, 3), nn.Linear(4, 3)], ""), torch.randn(40, 4)
    before = encoder.embed(inputs)
    encoder.learn_ambiguity([(inputs, torch.arange(40) % 4)])
    after = encoder.embed(inputs)
    assert after.kappa_aleatoric is not None
    assert after.p_known is not None
    q = 100 * after.p_known / (1 + 99 * after.p_known)
    expected = q * bessel_ratio(6, after.kappa_aleatoric) * before.resultant
    torch.testing.assert_close(after.resultant, expected, rtol=1e-4, atol=1e-6)

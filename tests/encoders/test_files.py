"""An encoder on disk: saved, loaded, exported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lam
from lam import models
from lam.encoders.files import _Program, fingerprint
from lam.hessians import AnInfoNCECurvature
from lam.inputs.preprocessing import Preprocessing
from lam.retrieval import Index
from lam.utils.files import CorruptFileError, seal, write_generation, write_text
from tests.encoders.small import WIDE, fit, make_batches, make_network, same_posterior


def test_saved_and_loaded_it_is_the_same_to_the_bit(tmp_path: Path):
    batches = make_batches(8, N=32)
    encoder = fit(batches[:4], preprocessing=Preprocessing(mode="L", size=(8, 8)))
    encoder.tune(batches[4:], n_samples=16, greatest=1e8)
    encoder.save(tmp_path / "encoder")
    loaded = lam.load(tmp_path / "encoder", make_network(seed=9))
    assert same_posterior(loaded, encoder)
    assert (loaded.preprocessing, loaded.relation, loaded.tuning, loaded.head) == (
        encoder.preprocessing,
        encoder.relation,
        encoder.tuning,
        encoder.head,
    )
    assert torch.equal(loaded.embed(batches).kappa, encoder.embed(batches).kappa)
    encoder.tune([], by="marginal_likelihood")
    encoder.save(tmp_path / "encoder")
    assert lam.load(tmp_path / "encoder", make_network()).posterior.prior_precision != 1.0


def test_named_networks_are_rebuilt_by_name_and_others_must_be_given(tmp_path: Path):
    network = models.build("convnet8", dimension=3, seed=4)
    images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    encoder = lam.fit(network, [(images, torch.arange(32) % 4)], margin=0.7, progress=False)
    encoder.save(tmp_path / "named")
    loaded = lam.load(tmp_path / "named")
    assert torch.equal(loaded.embed(images).kappa, encoder.embed(images).kappa)
    fit().save(tmp_path / "other")
    with pytest.raises(ValueError, match="rebuild by name"):
        lam.load(tmp_path / "other")
    with pytest.raises(ValueError, match=r"2\.bias.*\(4,\).*\(3,\).*2\.weight.*\(4, 12\)"):
        lam.load(tmp_path / "other", make_network(D=4))
    with pytest.raises(ValueError, match=r"0\.bias.*missing in the network; .*features\.0\.bias.*missing in the file"):
        lam.load(tmp_path / "other", models.build("convnet8", dimension=3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_has_the_types_that_it_was_saved_with(tmp_path: Path, dtype: torch.dtype):
    images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    network = models.build("convnet8", dimension=3).to(dtype)
    encoder = lam.fit(network, [(images, torch.arange(32) % 4)], margin=0.7, progress=False)
    encoder.save(tmp_path)
    given = models.build("convnet8", dimension=3, seed=1).requires_grad_(False)
    for loaded in (lam.load(tmp_path), lam.load(tmp_path, given)):
        assert {tensor.dtype for tensor in loaded.network.state_dict().values()} == {dtype}
        assert torch.equal(loaded.embed(images).mean, encoder.embed(images).mean)
    assert not any(parameter.requires_grad for parameter in given.parameters())


@pytest.mark.usefixtures("as_in_production")
def test_settings_may_be_numbers_of_numpy_and_torch(tmp_path: Path):
    options: dict[str, Any] = {"prior_precision": np.float32(2.0), "likelihood_scale": torch.tensor(9.0)}
    options["curvature"] = AnInfoNCECurvature(concentration=tuple(np.full(3, 0.7, np.float32)))
    encoder = lam.fit(make_network(), make_batches(), lam.Laplace(**options), seed=np.int64(4), progress=False)
    encoder.save(tmp_path)
    loaded = lam.load(tmp_path, make_network())
    assert torch.equal(loaded.embed(make_batches()).kappa, encoder.embed(make_batches()).kappa)
    assert (loaded + encoder).posterior.n_items == 2 * encoder.posterior.n_items


def test_nothing_of_another_kind_is_replaced(tmp_path: Path):
    encoder = fit()
    encoder.save(tmp_path / "encoder")
    index = Index(3)
    embeddings = encoder.embed(make_batches())
    index.add(embeddings, range(len(embeddings.kappa)))
    with pytest.raises(ValueError, match=r"encoder.*other files \(encoder.json, "):
        index.save(tmp_path / "encoder")
    index.save(tmp_path / "index")
    (tmp_path / "run").mkdir()
    write_text(tmp_path / "run" / "metrics.json", "{}")
    seal(tmp_path / "run", ["metrics.json"])
    for other in ("index", "run"):
        before = {path: path.read_bytes() for path in (tmp_path / other).rglob("*") if path.is_file()}
        with pytest.raises(ValueError, match=f"{other}.*other files"):
            encoder.save(tmp_path / other)
        assert before == {path: path.read_bytes() for path in (tmp_path / other).rglob("*") if path.is_file()}
    encoder.save(tmp_path / "encoder")
    assert same_posterior(lam.load(tmp_path / "encoder", make_network()), encoder)


def test_an_encoder_of_features_is_saved_without_a_network(tmp_path: Path):
    features, labels = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    encoder = lam.fit_features(features, labels, torch.eye(3, 5), margin=0.7)
    encoder.save(tmp_path)
    assert torch.equal(lam.load(tmp_path).embed(features).kappa, encoder.embed(features).kappa)
    with pytest.raises(ValueError, match="saved without.*network"):
        lam.load(tmp_path, make_network())
    encoder.export(tmp_path / "program.pt2", features[:2])
    program = torch.export.load(tmp_path / "program.pt2").module()
    expected = encoder.embed(features)
    torch.testing.assert_close(program(features)[1:], (expected.mean, expected.kappa, expected.variance))


def test_altered_files_and_other_versions_are_refused(tmp_path: Path):
    folder = tmp_path / "encoder"
    fit().save(folder)
    (posterior,) = folder.glob("generation-*/posterior.safetensors")
    content = bytearray(posterior.read_bytes())
    content[-3] ^= 1
    posterior.write_bytes(bytes(content))
    with pytest.raises(CorruptFileError, match="posterior.safetensors.*truncated"):
        lam.load(folder, make_network())
    with pytest.raises(CorruptFileError, match="MANIFEST.json is missing"):
        lam.load(tmp_path)
    fit().save(folder)
    (metadata,) = folder.glob("generation-*/encoder.json")
    from lam.utils.files import seal, write_json

    write_json(metadata, {**json.loads(metadata.read_text()), "format": 99})
    seal(folder, [str(path.relative_to(folder)) for path in folder.glob("generation-*/*")])
    with pytest.raises(ValueError, match="format 99.*version.*6"):
        lam.load(folder, make_network())


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_head_with_a_norm_by_hooks_is_loaded(norm: Any, tmp_path: Path) -> None:
    (network, other), batches = (make_network(seed) for seed in (0, 9)), make_batches()
    for layer in (network[2], other[2]):
        norm(layer)
    encoder = lam.fit(network, batches, margin=0.7, progress=False)
    encoder.save(tmp_path / "encoder")
    loaded = lam.load(tmp_path / "encoder", other)
    assert torch.equal(loaded.embed(batches).kappa, encoder.embed(batches).kappa)


def test_a_program_gives_features_as_the_encoder_does() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).bfloat16()
    inputs = torch.randn(8, 4, dtype=torch.bfloat16)
    encoder = lam.fit(network, [(inputs, torch.arange(8) % 2)], margin=0.7, progress=False)
    assert isinstance(encoder, lam.BayesianEncoder)
    predict = encoder.posterior.predictor(n_samples=4, mean="network", checked=False)
    features = _Program(network, encoder.head, predict)(inputs)[0]
    expected = encoder.predict([inputs]).features
    assert features.dtype == expected.dtype == torch.float32
    assert torch.equal(features, expected)


@pytest.mark.long
def test_exported_it_gives_the_same_for_any_batch_size(tmp_path: Path):
    batches = make_batches()
    encoder = fit(batches)
    with pytest.raises(ValueError, match="shape.*input.*unknown"):
        encoder.export(tmp_path / "encoder.pt2")
    encoder.export(tmp_path / "encoder.pt2", batches[0][0])
    program = torch.export.load(tmp_path / "encoder.pt2").module()
    for size in (2, 5, 16):
        inputs = batches[1][0][:size]
        features, mean, kappa, variance = program(inputs)
        expected = encoder.embed(inputs)
        torch.testing.assert_close(features, encoder.features(inputs))
        torch.testing.assert_close(mean, expected.mean)
        torch.testing.assert_close(kappa, expected.kappa, rtol=1e-4, atol=0)
        torch.testing.assert_close(variance, expected.variance)
    with pytest.raises(ValueError, match="at least 2 inputs"):
        encoder.export(tmp_path / "one.pt2", batches[0][0][:1])


@pytest.mark.long
def test_images_are_exported_without_an_example(tmp_path: Path):
    network = models.build("convnet8", dimension=WIDE)
    images = torch.rand(16, 1, 8, 8)
    sort = Preprocessing(mode="L", size=(8, 8))
    encoder = lam.fit(network, [(images, torch.arange(16) % 4)], margin=0.7, preprocessing=sort, progress=False)
    encoder.export(tmp_path / "encoder.pt2", n_samples=8)
    kappa = torch.export.load(tmp_path / "encoder.pt2").module()(images)[2]
    torch.testing.assert_close(kappa, encoder.embed(images, n_samples=8).kappa, rtol=1e-4, atol=0)


def test_the_fingerprint_is_of_the_content_and_not_of_when_it_was_written(tmp_path: Path) -> None:
    def written(text: str) -> str:
        write_generation(tmp_path, lambda path: write_text(path / "encoder.json", text))
        return fingerprint(tmp_path)

    assert written("{}") == written("{}") != written("[]")


def test_the_folder_of_a_run_names_its_encoder(tmp_path: Path) -> None:
    (tmp_path / "encoder").mkdir()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ValueError, match=r"is a run: give lam.load\('.*/encoder'\)"):
        lam.load(tmp_path)

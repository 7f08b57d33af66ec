"""Networks by name: shape, head, recipe, and an unchanged global random state."""

import inspect
import json

import pytest
import torch
from torch import nn

import lam
from lam import models

SMALL = {"convnet8": (1, 8, 8), "convnet28": (1, 28, 28), "convnet32": (3, 32, 32)}
IMAGES = SMALL | {
    "resnet18": (3, 32, 32),
    "cifar_resnet18": (3, 32, 32),
    "torchvision:mobilenet_v3_small": (3, 32, 32),
    "torchvision:vit_b_32": (3, 224, 224),
    "timm:mobilenetv3_small_050": (3, 32, 32),
    "timm:test_vit": (3, 160, 160),
}


@pytest.mark.parametrize("name", IMAGES)
def test_embeddings_are_unit_rows_given_by_the_head(name: str) -> None:
    network = models.build(name, dimension=5).eval()
    calls = []
    network.head.register_forward_hook(lambda _module, inputs, output: calls.append((inputs[0], output)))
    with torch.no_grad():
        embeddings = network(torch.rand(2, *IMAGES[name], generator=torch.Generator().manual_seed(0)))
    features, output = calls[0]
    assert features.shape == (2, network.head.in_features)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(embeddings, output / output.norm(dim=1, keepdim=True))
    assert [path for path, module in network.named_modules() if isinstance(module, nn.Linear)][-1] == "head"


@pytest.mark.long
@pytest.mark.parametrize(("name", "shape"), IMAGES.items())
def test_the_recipe_rebuilds_the_network(name: str, shape: tuple[int, int, int]) -> None:
    network = models.build(name, dimension=4, seed=1)
    again = models.build(**json.loads(json.dumps(network.recipe)))
    again.load_state_dict(network.state_dict())
    assert again.recipe == network.recipe
    images = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(network.eval()(images), again.eval()(images))


def test_a_vision_transformer_of_timm_takes_images_of_a_chosen_size() -> None:
    network = models.build("timm:test_vit", dimension=4, img_size=32)
    rebuilt = models.rebuild(json.loads(json.dumps(network.recipe)), network.state_dict())
    assert rebuilt(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


@pytest.mark.parametrize("recipe", [{}, {"name": "convnet8"}, {"name": 8, "dimension": 3}])
def test_a_recipe_without_a_name_or_dimension_is_refused(recipe: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="recipe.*name.*dimension"):
        models.rebuild(recipe, {})


@pytest.mark.parametrize("name", ["convnet28", "convnet32"])
def test_paper_networks_have_9216_features(name: str) -> None:
    assert models.build(name, dimension=3).head.weight.shape == (3, 9216)


def test_resnet50_has_2048_features() -> None:
    assert models.build("resnet50", dimension=64).head.weight.shape == (64, 2048)


def test_a_network_for_small_images_keeps_their_size_and_may_have_a_projection() -> None:
    network = models.build("cifar_resnet18", dimension=4, channels=1, projection=24).eval()
    assert network.head.weight.shape == (4, 24)
    shapes = []
    network.features.get_submodule("layer1").register_forward_hook(lambda *call: shapes.append(call[1][0].shape))
    assert network(torch.rand(2, 1, 28, 28)).shape == (2, 4)
    assert shapes == [(2, 64, 28, 28)]
    assert models.build(**network.recipe).state_dict().keys() == network.state_dict().keys()
    assert models.build("cifar_resnet50", dimension=4).head.weight.shape == (4, 2048)
    for options, message in (
        ({"channels": 0}, "channels.*1.*0"),
        ({"projection": -1}, "projection.*0.*-1"),
        ({"dropout": 1.0}, r"dropout.*\[0, 1\).*1"),
    ):
        with pytest.raises(ValueError, match=message):
            models.build("cifar_resnet18", dimension=4, **options)


def test_options_are_part_of_the_recipe() -> None:
    network = models.build("convnet8", dimension=3, channels=3)
    assert network.recipe == {"name": "convnet8", "dimension": 3, "channels": 3}
    assert network(torch.zeros(1, 3, 8, 8)).shape == (1, 3)


def test_the_size_that_weights_imply_is_part_of_the_recipe() -> None:
    assert models.build("torchvision:vit_b_32", dimension=3, image_size=64).recipe["image_size"] == 64


def test_inceptions_return_features_while_training() -> None:
    network = models.build("torchvision:googlenet", dimension=3)
    assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 3)


def test_same_seed_same_weights_and_the_global_state_is_untouched() -> None:
    state = torch.get_rng_state()
    first, same, other = (models.build("convnet8", dimension=3, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.head.weight, same.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize("name", ["timm:test_vit", "torchvision:mobilenet_v3_small"])
def test_a_posterior_is_put_on_the_head_of_a_library_s_network(name: str) -> None:
    network = models.build(name, dimension=4)
    images = torch.rand(8, *IMAGES[name], generator=torch.Generator().manual_seed(0))
    encoder = lam.fit(network, [(images, torch.arange(8) % 4)], margin=0.7)
    assert encoder.head == "head"
    assert encoder.embed(images).kappa.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_b_16", 224),
        ("resnet50", 64),
        ("densenet121", 64),
        ("convnext_tiny", 64),
        ("swin_t", 64),
        ("regnet_y_8gf", 64),
    ],
)
def test_larger_networks_of_torchvision_build_and_round_trip(name: str, size: int) -> None:
    test_the_recipe_rebuilds_the_network(f"torchvision:{name}", (3, size, size))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "resnet7",
            {},
            "resnet18, resnet50, .*torchvision:NAME, timm:NAME, sentence-transformers:NAME, got 'resnet7'",
        ),
        ("torchvision:", {}, "torchvision:NAME"),
        ("torchvision:resnet7", {}, "alexnet, .*'resnet7'"),
        ("timm:resnet7", {}, "no network 'resnet7'"),
        ("timm:resnet18", {"dropout": 0.3}, "resnet18.*timm.*'dropout'"),
        ("timm:resnet18", {"checkpoint_path": "x.pth"}, "checkpoint_path.*timm:resnet18.*dimension.*weights"),
        ("torchvision:squeezenet1_0", {}, "no linear classifier"),
        ("resnet18", {"weights": "LAION"}, "None, IMAGENET1K_V1.*'LAION'"),
        ("timm:resnet10t", {"weights": "LAION"}, "'DEFAULT'.*None.*got 'LAION'"),
        ("convnet8", {"colours": 3}, "colours.*it takes dimension, channels"),
        ("convnet8", {"channels": "x"}, "channels.*convnet8.*'x'"),
        ("torchvision:resnet18", {"colours": 3}, "resnet18.*torchvision.*'colours'"),
        ("convnet28", {"weights": "DEFAULT"}, "convnet28.*'weights'.*dimension, channels, dropout"),
        ("convnet32", {"dropout": 1.0}, r"dropout.*\[0, 1\).*1.0"),
        ("resnet18", {"dropout": -0.1}, "got -0.1"),
        ("convnet8", {"dimension": 1}, "at least 2, got 1"),
    ],
)
def test_bad_names_and_options(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.build(name, **{"dimension": 3} | options)


def test_every_named_network_documents_its_options() -> None:
    for make in models._NETWORKS.values():
        assert "dimension: embedding dimensions D." in inspect.getdoc(getattr(make, "func", make))


def test_a_builder_of_another_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_NETWORKS", dict(models._NETWORKS))
    models.register("mine", lambda *, dimension: nn.Linear(4, dimension))
    with pytest.raises(ValueError, match=r"mine.*lam\.models\.EmbeddingNetwork.*Linear"):
        models.build("mine", dimension=3)


def test_a_builder_that_ignores_the_dimension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_NETWORKS", dict(models._NETWORKS))
    models.register("mine", lambda *, dimension: models.EmbeddingNetwork(nn.Flatten(), nn.Linear(4, 10)))
    with pytest.raises(ValueError, match="head.*10.*dimension 3"):
        models.build("mine", dimension=3)
    assert models.build("mine", dimension=10).head.out_features == 10


def test_a_builder_that_loads_pretrained_weights_is_rebuilt_without_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    pretrained = nn.Linear(4, 4).state_dict()

    def build(*, dimension: int) -> models.EmbeddingNetwork:
        body = nn.Linear(4, 4)
        body.load_state_dict(pretrained)
        return models.EmbeddingNetwork(body, nn.Linear(4, dimension))

    monkeypatch.setattr(models, "_NETWORKS", dict(models._NETWORKS))
    models.register("mine", build)
    network = models.build("mine", dimension=3)
    rebuilt = models.rebuild(network.recipe, network.state_dict())
    assert torch.equal(rebuilt.state_dict()["features.weight"], pretrained["weight"])


def test_an_unknown_network_is_told_how_to_be_known() -> None:
    with pytest.raises(ValueError, match=r"'other'.*lam\.models\.register"):
        models.build("other", dimension=3)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_the_inceptions_of_torchvision_take_its_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import models as library
    from torchvision.models import WeightsEnum

    published = library.get_model(name, init_weights=False, aux_logits=True).state_dict()
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: published)
    network = models.build(f"torchvision:{name}", dimension=4, weights="DEFAULT")
    own = network.features.state_dict()
    assert all(torch.equal(published[path], value) for path, value in own.items())
    assert network(torch.zeros(2, 3, 96, 96)).shape == (2, 4)
    assert models.rebuild(network.recipe, network.state_dict()).features.transform_input

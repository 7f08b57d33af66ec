"""Networks of linear layers and leaky ReLUs, and a variational autoencoder whose decoder renders latents as images."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import skip_init

_WIDTH, _BATCH, _RATE = 256, 128, 1e-3


def layers(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Linear layers of these widths with leaky ReLUs between them, on the generator's device.

    At initialisation, the outputs of all layers have about the same variance.
    """
    modules: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        linear: Any = skip_init(nn.Linear, n_in, n_out, device=generator.device)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="leaky_relu", generator=generator)
        nn.init.uniform_(linear.bias, -(n_in**-0.5), n_in**-0.5, generator=generator)
        modules += [linear, nn.LeakyReLU()]
    return nn.Sequential(*modules[:-1])


class Decoder(nn.Module):
    """Map latents on the unit sphere, times √D (the length of Gaussian latents), to pixels in [0, 1].

    Source: Rusak et al. (2024), appendices F and I.5: three linear layers, D = 10, 50 epochs of MNIST.
    """

    def __init__(self, dimension: int, n_pixels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.scale = dimension**0.5
        self.logits = layers([dimension, _WIDTH, _WIDTH, n_pixels], generator)

    def forward(self, z: Float[Tensor, "N D"]) -> Float[Tensor, "N I"]:
        return self.logits(self.scale * z).sigmoid()


def trained_decoder(pixels: Float[Tensor, "O I"], dimension: int, epochs: int, generator: torch.Generator) -> Decoder:
    """Train an encoder and a decoder of images in [0, 1] by the evidence lower bound; return the decoder.

    The generator is the source of weights, latents and batches, which are drawn with replacement; the training is on
    its device.
    """
    pixels = pixels.to(generator.device)
    encoder = layers([pixels.shape[1], _WIDTH, _WIDTH, 2 * dimension], generator)
    decoder = Decoder(dimension, pixels.shape[1], generator)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], _RATE)
    for _ in range(epochs * -(-len(pixels) // _BATCH)):
        rows = torch.randint(len(pixels), (_BATCH,), generator=generator, device=generator.device)
        images = pixels[rows]
        mean, log_variance = encoder(images).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=generator, device=generator.device)
        logits = decoder.logits(mean + (log_variance / 2).exp() * noise)
        error = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
        optimizer.zero_grad()
        ((error + divergence) / _BATCH).backward()
        optimizer.step()
    return decoder.requires_grad_(False)

"""A network for texts that needs no library: hashed words, a fixed projection, a linear head."""

import zlib

import torch
from torch import Tensor, nn

from lam.inputs.preprocessing import texts_of
from lam.models import EmbeddingNetwork, register
from lam.models.frozen import identity_layer

WIDTH = 64


class BagOfWords(nn.Module):
    """Counts of hashed words, on a logarithmic scale."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Features (N, 64) of N texts."""
        counts = torch.zeros(len(inputs), WIDTH)
        for row, text in enumerate(texts_of(inputs)):
            for word in text.lower().split():
                counts[row, zlib.crc32(word.encode()) % WIDTH] += 1
        return counts.log1p().to(inputs.device)


def bag_of_words(*, dimension: int, dropout: float = 0.0) -> EmbeddingNetwork:
    """The network, as `lam.models.register` takes it.

    Args:
        dimension: embedding dimensions D.
        dropout: dropout rate of the counts.
    """
    features = nn.Sequential(BagOfWords(), nn.Dropout(dropout)) if dropout else BagOfWords()
    return EmbeddingNetwork(features, nn.Linear(WIDTH, dimension))


register("bag_of_words", bag_of_words)


def bag_of_words_as_it_is(*, dimension: int, head: str = "identity") -> EmbeddingNetwork:
    """The network with a head that changes nothing.

    Args:
        dimension: embedding dimensions D. This argument has no effect: D is the number of counts.
        head: `identity`.
    """
    return EmbeddingNetwork(BagOfWords(), identity_layer(WIDTH))


register("bag_of_words_as_it_is", bag_of_words_as_it_is)

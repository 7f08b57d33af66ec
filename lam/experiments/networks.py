"""Networks of linear layers and leaky ReLUs for experiments."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.utils import skip_init


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

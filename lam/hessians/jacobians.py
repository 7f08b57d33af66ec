"""Jacobians of a network's outputs with respect to the weights of one layer, and quadratic forms of these Jacobians.

A linear layer or a convolution applies one matrix at every place (position) of its input. The matrix has a row for
each of U output channels and a column for each of F inputs; the last column is the bias, if any. The layer's weights
are the n entries of this matrix in one vector. The weights of any other layer are its parameters in one vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

_CACHED = 1 << 14
"""Columns of a Jacobian that a CPU multiplies at once; they fit in its cache, so large layers are 3 times faster."""


@dataclass(frozen=True)
class Dense:
    """Jacobians J_a of N items as one tensor: derivatives of an item's D outputs in the n weights of any layer."""

    J: Float[Tensor, "N D n"]

    def quadratic(self, matrices: Float[Tensor, "N T D D"]) -> Float[Tensor, "T n"]:
        """Diagonal of Σ_a J_aᵀ H_a J_a over the items a. Each item has T matrices H_a; each gives one row."""
        parts = self.J.split(_CACHED, 2) if self.J.device.type == "cpu" else (self.J,)
        each = matrices.to(self.J).unbind(1)
        return torch.cat([torch.stack([((H @ part) * part).sum((0, 1)) for H in each]) for part in parts], 1)

    def spread(self, variances: Float[Tensor, " n"]) -> Float[Tensor, "N D D"]:
        """J_a diag(v) J_aᵀ for variances v; float64 keeps the result positive semi-definite."""
        return _squared(self.J * variances.sqrt())

    def along(self, deviations: Float[Tensor, "S n"]) -> Float[Tensor, "S N D"]:
        """J_a δ, for S deviations δ of the weights."""
        return (self.J.flatten(0, 1) @ deviations.T).T.unflatten(1, self.J.shape[:2])


@dataclass(frozen=True)
class Outer:
    """As `Dense`: Jacobians g_a ⊗ φ_a for a matrix that is applied at one place only; stored as factors."""

    slopes: Float[Tensor, "N D U"]  # g, derivatives of the network's outputs in the layer's outputs
    inputs: Float[Tensor, "N F"]  # φ

    def quadratic(self, matrices: Float[Tensor, "N T D D"]) -> Float[Tensor, "T n"]:
        """Σ_a (g_aᵀ H_a g_a)_oo φ_af² for each output o and input f of the layer."""
        own = torch.einsum("ado,atde,aeo->ato", self.slopes, matrices.to(self.slopes), self.slopes)
        return torch.einsum("ato,af->tof", own, self.inputs.square()).flatten(1)

    def spread(self, variances: Float[Tensor, " n"]) -> Float[Tensor, "N D D"]:
        """g_a diag_o(Σ_f φ_af² v_of) g_aᵀ."""
        of_outputs = self.inputs.square() @ variances.view(-1, self.inputs.shape[1]).T
        return _squared(self.slopes * of_outputs.sqrt()[:, None])

    def along(self, deviations: Float[Tensor, "S n"]) -> Float[Tensor, "S N D"]:
        matrices = deviations.unflatten(1, (-1, self.inputs.shape[1]))
        return torch.einsum("ado,sof,af->sad", self.slopes, matrices, self.inputs)


def _squared(roots: Float[Tensor, "N D _"]) -> Float[Tensor, "N D D"]:
    roots = roots.double()
    return roots @ roots.mT


def is_matrix(module: nn.Module) -> bool:
    """Whether a layer applies one matrix at every place: `nn.Linear`, or `nn.Conv2d` with one group.

    A subclass with its own `forward` does not count, because that may normalise or pad.
    """
    kind: Any = type(module)
    if module._parameters.get("weight") is None:
        return False
    if isinstance(module, nn.Conv2d):
        as_torch = kind.forward is nn.Conv2d.forward and kind._conv_forward is nn.Conv2d._conv_forward
        return as_torch and module.groups == 1
    return isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward


def shape_of(module: nn.Module, weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Rows U and columns F of a layer's weights; one row for a layer without a matrix."""
    if not is_matrix(module):
        return 1, sum(weight.numel() for weight in weights.values())
    weight = weights["weight"].flatten(1)
    return weight.shape[0], weight.shape[1] + ("bias" in weights)


def flat_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> Float[Tensor, " n"]:
    """The weights of a layer in one vector."""
    if not is_matrix(module):
        return torch.cat([weight.flatten() for weight in weights.values()])
    matrix = weights["weight"].flatten(1)
    return (torch.cat([matrix, weights["bias"][:, None]], 1) if "bias" in weights else matrix).flatten()


def unflat_weights(module: nn.Module, weights: Mapping[str, Tensor], flat: Float[Tensor, "S n"]) -> dict[str, Tensor]:
    """S sets of a layer's parameters by name, from S vectors: the inverse of `flat_weights`."""
    if not is_matrix(module):
        parts = flat.split([weight.numel() for weight in weights.values()], 1)
        return {name: part.reshape(len(flat), *weights[name].shape) for name, part in zip(weights, parts, strict=True)}
    matrix, weight = flat.unflatten(1, shape_of(module, weights)), weights["weight"]
    if "bias" not in weights:
        return {"weight": matrix.reshape(-1, *weight.shape)}
    return {"weight": matrix[..., :-1].reshape(-1, *weight.shape), "bias": matrix[..., -1]}


def places(
    module: Any, inputs: Float[Tensor, "N ..."], slopes: Float[Tensor, "N D ..."]
) -> tuple[Float[Tensor, "N Z F"], Float[Tensor, "N D Z U"]]:
    """Inputs of a layer's matrix at its Z places, with a 1 appended for a bias; and `slopes` at the same places."""
    if isinstance(module, nn.Conv2d):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = F.pad(inputs, module._reversed_padding_repeated_twice, mode)  # as the layer does, for any padding
        at = F.unfold(padded, module.kernel_size, module.dilation, 0, module.stride).mT
        slopes = slopes.flatten(3).mT
    else:
        at = inputs.reshape(len(inputs), -1, inputs.shape[-1])
        slopes = slopes.flatten(2, -2) if slopes.ndim > 3 else slopes[:, :, None]
    return (at if module.bias is None else F.pad(at, (0, 1), value=1.0)), slopes


def jacobian(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    inputs: Float[Tensor, "N ..."],
    slopes: Float[Tensor, "N D ..."],
    basis: tuple[Float[Tensor, "U U"], Float[Tensor, "F F"]] | None = None,
) -> Dense | Outer:
    """Jacobians of a network's outputs with respect to the weights of a layer.

    Args:
        module: the layer, in evaluation mode.
        weights: its parameters, by name.
        inputs: inputs of the layer.
        slopes: derivatives of the network's D outputs with respect to the layer's outputs.
        basis: orthonormal bases for the rows and columns of the layer's matrix; the Jacobian is expressed in them.
            Layers without a matrix ignore the bases.
    """
    if not is_matrix(module):
        return Dense(_any_jacobian(module, weights, inputs, slopes))
    at, slopes = places(module, inputs, slopes)
    if basis is not None:
        at, slopes = at @ basis[1].to(at), slopes @ basis[0].to(slopes)
    if at.shape[1] == 1:
        return Outer(slopes[:, :, 0], at[:, 0])
    return Dense((slopes.mT @ at[:, None]).flatten(2))


def _any_jacobian(module: nn.Module, weights: Mapping[str, Tensor], inputs: Tensor, slopes: Tensor) -> Tensor:
    """Jacobians by autograd, in one vmap over all outputs of all items; nested vmaps are wrong for nn.PReLU."""

    def of_row(own: Tensor, pulled: Tensor) -> Tensor:
        pull = vjp(lambda changed: functional_call(module, changed, (own[None],))[0], dict(weights))[1]
        row = pull(pulled)[0]
        return torch.cat([row[name].flatten() for name in weights])

    N, D = slopes.shape[:2]
    return vmap(of_row)(inputs.repeat_interleave(D, 0), slopes.flatten(0, 1)).unflatten(0, (N, D))

"""Curvatures of the weights of several layers, without terms between two layers: `LayersDiagonal`, `LayersKron`.

The exact curvature is Σ_a J_aᵀ H_a J_a. J_a is the Jacobian of item a's outputs with respect to the weights, and H_a is
the curvature of the loss with respect to these outputs. A structure holds the diagonal of this sum, or two factors for
each layer. A tensor of sums holds the flattened sums of all layers, one layer after the other.

A linear layer or a convolution applies one matrix at every place (position) of its input. The matrix has a row for
each of U output channels and a column for each of F inputs; the last column is the bias, if any. The layer's weights
are the n entries of this matrix in one vector. The weights of any other layer are its parameters in one vector.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from lam.hessians.losses import Curvature
from lam.hessians.structures.base import MAX_MEMORY, Shapes, SummedCurvature, eigen, is_negative
from lam.utils.checks import layers_without

_CACHED = 1 << 14
"""Columns of a Jacobian that a CPU multiplies at once; they fit in its cache, so large layers are 3 times faster."""

Weights = Mapping[str, Tensor]
Basis = tuple[Float[Tensor, "U U"], Float[Tensor, "F F"]]


@dataclass(frozen=True)
class Dense:
    """Jacobians J_a of N items as one tensor: derivatives of an item's D outputs with respect to the n weights."""

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

    slopes: Float[Tensor, "N D U"]  # g, derivatives of the network's outputs with respect to the layer's
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

    A subclass with its own `forward` does not count, because it may normalise or pad.
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
    """Jacobians of a network's D outputs with respect to the weights of a layer, in evaluation mode.

    `slopes` are the derivatives with respect to the layer's outputs. The Jacobian is expressed in `basis`, orthonormal
    bases for the rows and columns of the layer's matrix; a layer without a matrix ignores them.
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


Same = TypeVar("Same", bound="LayersCurvature")


@dataclass(frozen=True)
class LayersCurvature(SummedCurvature):
    """Base of `LayersDiagonal` and `LayersKron`.

    Attributes:
        shapes: rows U and columns F of each layer's weights; see the module.
    """

    setting_fields = ("shapes",)
    forms_jacobians: ClassVar[bool] = True

    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def zeros(
        cls: type[Same],
        layers: Mapping[str, tuple[nn.Module, Weights]],
        curvature: Curvature,
        *,
        max_memory: int = MAX_MEMORY,
    ) -> Same:
        """The structure with all sums zero, in float64; `layers` maps paths to modules and weights.

        Raises:
            ValueError: for cross terms of two items, unsupported layers, and sums beyond `max_memory`.
        """
        cls.check_cross_terms(curvature)
        unsupported = [path for path, (module, _) in layers.items() if not cls.takes(module)]
        if unsupported:
            kind = type(layers[unsupported[0]][0]).__name__
            raise ValueError(
                f'structure="{cls.name}" takes only linear layers and convolutions of images without groups, got layer '
                f'{unsupported[0]!r} ({kind}): {layers_without(unsupported, layers)}, or use structure="diag"'
            )
        shapes = tuple(shape_of(*layer) for layer in layers.values())
        n_bytes = 8 * sum(math.prod(shape) for shape in cls.sum_shapes(len(curvature.terms), shapes).values() if shape)
        if n_bytes > max_memory:
            n_weights = sum(map(math.prod, shapes))
            raise ValueError(
                f'structure="{cls.name}" of {len(shapes)} layers with {n_weights:,} weights takes {n_bytes:,} bytes, '
                f"more than max_memory, {max_memory:,}: allow more, or name fewer layers"
                + ("" if cls.name == "diag" else ', or use structure="diag"')
            )
        device = next(iter(next(iter(layers.values()))[1].values())).device
        return cls._of_zeros(cls.sum_shapes(len(curvature.terms), shapes), curvature, device, shapes=shapes)

    @classmethod
    def check_cross_terms(cls, curvature: Curvature) -> None:
        if curvature.has_cross_terms:
            raise ValueError(
                f"layers other than the last cannot hold cross terms of two items, which {curvature} has: use "
                'fix="fixed", or layers="last" with structure="diag"'
            )

    @classmethod
    def restored(cls: type[Same], tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Same:
        rows_and_columns = tuple((rows, columns) for rows, columns in settings["shapes"])  # lists in JSON
        return super().restored(tensors, {**settings, "shapes": rows_and_columns})

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Whether the structure can hold the curvature of a layer."""
        return True

    @classmethod
    @abstractmethod
    def sum_shapes(cls, T: int, shapes: Sequence[tuple[int, int]]) -> Shapes:
        """Shapes of the sums of T terms, by name."""

    @abstractmethod
    def of_passes(self: Same, passes: Sequence[Any], matrices: Float[Tensor, "N T D D"]) -> Same:
        """The structure with the sums of N items with curvatures H_a; the caller sets the counts.

        `passes` holds a `LayerPass` of each layer, from `lam.models.layers.linearised`.
        """

    @property
    def bases(self) -> Sequence[Basis | None]:
        """Orthonormal bases for the rows and columns of each layer's weights; None for the standard basis."""
        return [None] * len(self.shapes)

    @property
    @abstractmethod
    def spectra(self) -> list[Float[Tensor, " n"]]:
        """The diagonal of h in `bases` for each layer, including negative entries."""

    @property
    def level(self) -> float:
        return float(torch.cat([spectrum.double().relu().flatten() for spectrum in self.spectra]).mean())

    @property
    def clipped(self) -> float:
        negative = sum(int(is_negative(spectrum).sum()) for spectrum in self.spectra)
        return negative / sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class LayersDiagonal(LayersCurvature):
    """The diagonal of Σ_a J_aᵀ H_a J_a, exactly.

    The class works for any layer in any network, by D backward passes.

    Attributes:
        sums: (T, n) sums for all weights.
    """

    name = "diag"

    sums: Float[Tensor, "T n"]

    @classmethod
    def sum_shapes(cls, T: int, shapes: Sequence[tuple[int, int]]) -> Shapes:
        return {"sums": (T, sum(map(math.prod, shapes)))}

    def of_passes(self, passes: Sequence[Any], matrices: Float[Tensor, "N T D D"]) -> "LayersDiagonal":
        """Σ_a Σ_ik H_a,ik J_a,ip J_a,kp for every weight p."""
        parts = []
        for of in passes:
            try:
                J = jacobian(of.module, of.weights, of.inputs, of.slopes)
            except RuntimeError as error:
                problem = str(error).partition("\n")[0].partition(". ")[0]
                instead = layers_without([of.path], [each.path for each in passes])
                raise ValueError(
                    f"layer {of.path!r} ({type(of.module).__name__}) has no derivative for single items, because "
                    f"torch.func cannot differentiate it ({problem}): {instead}"
                ) from error
            parts.append(J.quadratic(matrices))
        return replace(self, sums=torch.cat(parts, 1))

    @property
    def spectra(self) -> list[Float[Tensor, " n"]]:
        return list(self.h.split([math.prod(shape) for shape in self.shapes]))


@dataclass(frozen=True)
class LayersKron(LayersCurvature):
    """B ⊗ A for each layer. A layer applies one matrix at Z places z of its input.

    A is the mean over items a of Σ_z φ_az φ_azᵀ, with the matrix's input φ_az at z. B is Σ_t w_t S_t/n_t (see
    `SummedCurvature`) with S_t = 1/Z Σ_a Σ_z g_azᵀ H_a g_az, with H_a of `Structure`. g_az is the Jacobian of the
    network's outputs with respect to the layer's output at z. The product assumes that places are alike and not
    correlated. For a last layer with one place, B ⊗ A equals `Kron`.

    Source: Martens and Grosse (2015), KFAC; Grosse and Martens (2016), KFC, for convolutions.

    Attributes:
        sums: (T, ΣU²) S_t of all layers.
        inputs: (ΣF²,) sums of Σ_z φφᵀ over the items.
        n_items: number of items in these sums.
    """

    name = "kron"
    forms_jacobians = False
    sum_fields = ("sums", "inputs", "n_items")

    sums: Float[Tensor, "T n"]
    inputs: Float[Tensor, " m"]
    n_items: Float[Tensor, ""]

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return is_matrix(module)

    @classmethod
    def sum_shapes(cls, T: int, shapes: Sequence[tuple[int, int]]) -> Shapes:
        rows, columns = (sum(shape[side] ** 2 for shape in shapes) for side in (0, 1))
        return {"sums": (T, rows), "inputs": (columns,), "n_items": ()}

    def of_passes(self, passes: Sequence[Any], matrices: Float[Tensor, "N T D D"]) -> "LayersKron":
        outputs, inputs = [], []
        for of in passes:
            at, slopes = places(of.module, of.inputs, of.slopes)
            own = slopes.flatten(0, 2)
            weighted = ((H @ slopes.flatten(2)).view(own.shape) for H in matrices.to(slopes).unbind(1))
            outputs.append(torch.stack([part.T @ own / at.shape[1] for part in weighted]).flatten(1))
            inputs.append((at.flatten(0, 1).T @ at.flatten(0, 1)).flatten())
        n_items = torch.full_like(self.n_items, len(matrices))
        return replace(self, sums=torch.cat(outputs, 1), inputs=torch.cat(inputs), n_items=n_items)

    @property
    def bases(self) -> Sequence[Basis | None]:
        return [(U_B, U_A) for (_, U_B), (_, U_A) in self._eigen]

    @property
    def spectra(self) -> list[Float[Tensor, " n"]]:
        return [torch.outer(b, a.clamp(min=0)).flatten() for (b, _), (a, _) in self._eigen]

    @cached_property
    def _eigen(self) -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        outputs = self.h.split([rows**2 for rows, _ in self.shapes])
        inputs = (self.inputs / self.n_items).split([columns**2 for _, columns in self.shapes])
        return [
            (eigen(B.view(rows, rows)), eigen(A.view(columns, columns)))
            for (rows, columns), B, A in zip(self.shapes, outputs, inputs, strict=True)
        ]

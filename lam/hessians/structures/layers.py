"""Curvatures of the weights of several layers, without terms between two layers: `LayersDiagonal`, `LayersKron`.

The exact curvature is Σ_a J_aᵀ H_a J_a. J_a is the Jacobian of item a's outputs with respect to the weights, and H_a is
the curvature of the loss with respect to these outputs. A structure holds the diagonal of this sum, or two factors for
each layer. A tensor of sums holds the flattened sums of all layers, one layer after the other.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.hessians.jacobians import is_matrix, jacobian, places, shape_of
from lam.hessians.losses import Curvature
from lam.hessians.structures.base import MAX_MEMORY, Shapes, SummedCurvature, eigen, is_negative
from lam.utils.checks import layers_without

Same = TypeVar("Same", bound="LayersCurvature")
Weights = Mapping[str, Tensor]
Basis = tuple[Float[Tensor, "U U"], Float[Tensor, "F F"]]


@dataclass(frozen=True)
class LayersCurvature(SummedCurvature):
    """Base of `LayersDiagonal` and `LayersKron`.

    Attributes:
        shapes: rows U and columns F of each layer's weights; see `lam.hessians.jacobians`.
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
        """The structure with the sums of N items; the caller sets the counts.

        Args:
            passes: a `LayerPass` for each layer, from `lam.models.layers.linearised`.
            matrices: H_a of each item and term.
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

    BackPACK's `DiagGGNExact` computes the same from symmetric factors of H_a (tests/hessians/test_layers.py). This
    class works for any layer in any network, by D backward passes.

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
    """B ⊗ A for each layer, where a layer applies one matrix at Z places z of its input.

    A is the mean over items a of Σ_z φ_az φ_azᵀ, with the matrix's input φ_az. B is Σ_t w_t S_t/n_t with
    S_t = 1/Z Σ_a Σ_z g_azᵀ H_a g_az. g_az are the derivatives of the network's outputs by the layer's output at z.
    For a last layer with one place, this equals `Kron`. Places of a convolution are assumed uncorrelated and alike.

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

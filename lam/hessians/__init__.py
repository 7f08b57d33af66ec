"""Curvature of a loss with respect to a network's weights."""

from lam.hessians.last_layer import (
    diagonal_ggn,
    ggn_of_batch,
    ggn_of_dataset,
    output_curvature,
    total_output_curvature,
)
from lam.hessians.losses import (
    CURVATURES,
    AnInfoNCECurvature,
    ContrastiveCurvature,
    Curvature,
    InfoNCECurvature,
    SupConCurvature,
    VarConCurvature,
    register,
)
from lam.hessians.structures.base import Structure, SummedCurvature
from lam.hessians.structures.diagonal import Diagonal
from lam.hessians.structures.full import Full
from lam.hessians.structures.kron import Ekfac, Kron
from lam.hessians.structures.layers import LayersDiagonal, LayersKron
from lam.hessians.structures.low_rank import LowRank

__all__ = [
    "CURVATURES",
    "AnInfoNCECurvature",
    "ContrastiveCurvature",
    "Curvature",
    "Diagonal",
    "Ekfac",
    "Full",
    "InfoNCECurvature",
    "Kron",
    "LayersDiagonal",
    "LayersKron",
    "LowRank",
    "Structure",
    "SummedCurvature",
    "SupConCurvature",
    "VarConCurvature",
    "diagonal_ggn",
    "ggn_of_batch",
    "ggn_of_dataset",
    "output_curvature",
    "register",
    "total_output_curvature",
]

"""Curvature of a loss with respect to a network's weights."""

from lam.hessians.last_layer import diagonal_ggn, ggn_of_batch, ggn_of_dataset, output_curvature
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
from lam.hessians.losses.softmax import SoftmaxCurvature
from lam.hessians.structures.base import Structure, SummedCurvature
from lam.hessians.structures.last_layer import Diagonal, Ekfac, Full, Kron, LowRank
from lam.hessians.structures.layers import LayersDiagonal, LayersKron

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
    "SoftmaxCurvature",
    "Structure",
    "SummedCurvature",
    "SupConCurvature",
    "VarConCurvature",
    "diagonal_ggn",
    "ggn_of_batch",
    "ggn_of_dataset",
    "output_curvature",
    "register",
]

"""Curvature of a loss in the weights of a linear last layer: one file a loss, one file a structure."""

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
from lam.hessians.losses.contrastive import FIXES, SPLITS, Fix, Split
from lam.hessians.structures import (
    Diagonal,
    Ekfac,
    Full,
    Kron,
    LayersCurvature,
    LayersDiagonal,
    LayersKron,
    LowRank,
    Structure,
    SummedCurvature,
)

__all__ = [
    "CURVATURES",
    "FIXES",
    "SPLITS",
    "AnInfoNCECurvature",
    "ContrastiveCurvature",
    "Curvature",
    "Diagonal",
    "Ekfac",
    "Fix",
    "Full",
    "InfoNCECurvature",
    "Kron",
    "LayersCurvature",
    "LayersDiagonal",
    "LayersKron",
    "LowRank",
    "Split",
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

"""ONNX: an encoder as one graph from inputs to directions and κ, for onnxruntime and other runtimes."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lam.encoders.bayesian import BayesianEncoder
from lam.utils.extras import needs_extra
from lam.utils.files import check_output, write_atomically

with needs_extra("onnx", "export to ONNX"):
    import onnxscript

OUTPUTS = "features", "mean", "kappa", "variance"
PARTS = "kappa_epistemic", "kappa_aleatoric", "p_known"
_OPSET = 18
_op: Any = onnxscript.opset18


def export(encoder: BayesianEncoder, path: str | Path, example: Tensor | None = None, **options: Any) -> None:
    """Write an ONNX graph with the input `inputs` and the outputs features, mean, kappa and variance.

    The batch size is free. After `learn_ambiguity`, there are also kappa_epistemic, kappa_aleatoric and p_known. The
    random numbers behind κ are part of the graph, so κ equals `encoder.embed(...).kappa` up to rounding.

    Args:
        encoder: an encoder of images or other tensors; a graph cannot tokenize texts.
        path: the file, usually with the suffix .onnx.
        example: (N, ...) a batch of at least 2 inputs; by default blank images of the shape of `preprocessing`.
        options: `n_samples`, as in `BayesianEncoder.export`.

    Raises:
        ValueError: as `BayesianEncoder.export`; also for an encoder of another class, or operators that ONNX lacks.
    """
    if not isinstance(encoder, BayesianEncoder):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"export takes a BayesianEncoder, such as lam.fit returns, got {type(encoder).__name__}")
    check_output(path)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        encoder.export(program := Path(folder) / "encoder.pt2", example, **options)
        warnings.simplefilter("ignore")  # the exporter warns of its own libraries
        names = [*OUTPUTS, *(() if encoder.ambiguity is None else PARTS)]
        try:
            exported: Any = torch.onnx.export(
                torch.export.load(program),
                dynamo=True,
                verbose=False,
                opset_version=_OPSET,
                input_names=["inputs"],
                custom_translation_table={
                    torch.ops.prims.hypot.default: _hypot,
                    torch.ops.aten.cumprod.default: _cumprod,
                },
            )
        except torch.onnx.OnnxExporterError as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ValueError(f"the network cannot be written as ONNX ({reason}): use encoder.export instead") from error
        _name_outputs(exported.model.graph, names)
        exported.save(graph := Path(folder) / "encoder.onnx", external_data=False)
        write_atomically(path, lambda temporary: temporary.write_bytes(graph.read_bytes()))


def _name_outputs(graph: Any, names: list[str]) -> None:
    """Name the outputs, and rename inner values that have one of these names, such as `mean`."""
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in names:
                value.name = f"inner_{value.name}"
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


def _hypot(a: Any, b: Any) -> Any:
    """√(a² + b²); the squares do not overflow, because κ is at most 1e8."""
    return _op.Sqrt(_op.Add(_op.Mul(a, a), _op.Mul(b, b)))


def _cumprod(values: Any, dim: int, **_: Any) -> Any:
    """Cumulative products of positive numbers along an axis."""
    return _op.Exp(_op.CumSum(_op.Log(values), _op.Constant(value_int=dim)))

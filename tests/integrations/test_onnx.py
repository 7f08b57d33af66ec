"""The ONNX graph of an encoder gives the encoder's own directions and κ under onnxruntime, for any batch size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lam
from lam.encoders.deterministic import DeterministicEncoder
from lam.integrations import onnx
from lam.vmf import bessel

C, HEIGHT = 3, 8


def encoder(dimension: int) -> lam.BayesianEncoder:
    """An encoder of small images."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(C * HEIGHT**2, 32), nn.ReLU(), nn.Linear(32, dimension))
    batches = [(images(64, seed), torch.arange(64) % 8) for seed in range(3)]
    return lam.fit(network, batches, margin=0.7, progress=False)


def images(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, C, HEIGHT, HEIGHT, generator=torch.Generator().manual_seed(seed))


def session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.long
@pytest.mark.parametrize("dimension", [2, 8, 41, 48])
def test_directions_and_kappa_are_the_encoders_on_a_thousand_inputs(dimension: int, tmp_path: Path) -> None:
    made = encoder(dimension)
    onnx.export(made, tmp_path / "encoder.onnx", images(2))
    graph = session(tmp_path / "encoder.onnx")
    inputs = torch.cat([images(500, 9), 4 * images(500, 10)])
    for batch in (inputs, inputs[:1]):
        prediction = made.predict(batch)
        features, mean, kappa, variance = map(
            torch.from_numpy, graph.run(["features", "mean", "kappa", "variance"], {"inputs": batch.numpy()})
        )
        torch.testing.assert_close(features, prediction.features, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(mean, prediction.embeddings.mean, atol=1e-5, rtol=0)
        torch.testing.assert_close(kappa, prediction.embeddings.kappa, rtol=1e-4, atol=0)
        torch.testing.assert_close(variance, prediction.embeddings.variance, rtol=1e-4, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["encoder.onnx"]


@pytest.mark.long
def test_a_learned_ambiguity_is_part_of_the_graph(tmp_path: Path) -> None:
    made = encoder(48)
    made.learn_ambiguity((images(64, 7), torch.arange(64) % 8))
    onnx.export(made, tmp_path / "encoder.onnx", images(2))
    embeddings = made.embed(images(100, 8))
    names = ["mean", "kappa", *embeddings.parts()]
    outputs = session(tmp_path / "encoder.onnx").run(names, {"inputs": images(100, 8).numpy()})
    expected = [embeddings.mean, embeddings.kappa, *embeddings.parts().values()]
    for output, value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(output), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dimension", [2, 3, 8, 41])
def test_the_table_of_exported_graphs_inverts_the_ratio(dimension: int) -> None:
    bessel.tabulate_for_export(dimension)
    kappa = torch.logspace(-6, 7.9, 3000, dtype=torch.float64)
    length, complement = (call(dimension, kappa) for call in (bessel.bessel_ratio, bessel.bessel_ratio_complement))
    torch.testing.assert_close(bessel._start_by_table(dimension, length, complement), kappa, rtol=1e-8, atol=0)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert bessel._start_by_table(dimension, ends, 1 - ends).tolist() == [0, torch.inf]


@pytest.mark.long
def test_a_graph_of_few_dimensions_has_few_nodes(tmp_path: Path) -> None:
    for dimension in (8, 48):
        encoder(dimension).export(tmp_path / f"{dimension}.pt2", images(2))
    sizes = [len(torch.export.load(tmp_path / f"{dimension}.pt2").graph.nodes) for dimension in (8, 48)]
    assert sizes[0] < sizes[1]


def test_an_encoder_without_a_network_is_a_graph_from_features(tmp_path: Path) -> None:
    features = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    of_features = lam.fit_features(features, torch.arange(32) % 4, torch.eye(3, 8), margin=0.7)
    onnx.export(of_features, tmp_path / "encoder.onnx", features[:2])
    mean, kappa = session(tmp_path / "encoder.onnx").run(["mean", "kappa"], {"inputs": features.numpy()})
    expected = of_features.embed(features)
    torch.testing.assert_close(torch.as_tensor(mean), expected.mean)
    torch.testing.assert_close(torch.as_tensor(kappa), expected.kappa, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("export", [onnx.export, lam.BayesianEncoder.export], ids=["onnx", "program"])
def test_an_array_and_a_path_without_a_folder_are_refused_before_the_work(export: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"example.*torch.as_tensor\(example\)"):
        export(encoder(3), tmp_path / "encoder", images(2).numpy())
    with pytest.raises(ValueError, match=r"example.*named inputs \(x\)"):
        export(encoder(3), tmp_path / "encoder", {"x": images(2)})
    with pytest.raises(ValueError, match="no folder .*absent.*encoder"):
        export(encoder(3), tmp_path / "absent" / "encoder", images(2))
    with pytest.raises(ValueError, match="is a folder"):
        export(encoder(3), tmp_path, images(2))


@pytest.mark.usefixtures("as_in_production")
def test_another_encoder_is_an_error(tmp_path: Path) -> None:
    other: Any = DeterministicEncoder(nn.Sequential(nn.Linear(2, 2)), "0")
    with pytest.raises(ValueError, match="export.*BayesianEncoder.*DeterministicEncoder"):
        onnx.export(other, tmp_path / "encoder.onnx")

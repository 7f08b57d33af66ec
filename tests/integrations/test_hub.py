"""A repository of the Hub, as a local folder: the encoder to the bit, its calibration, and a card with both tables."""

import shutil
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lam
from lam.encoders.deterministic import DeterministicEncoder
from lam.integrations.hub import HubEncoder
from lam.retrieval import SCORES, Calibration
from lam.utils.files import CorruptFileError
from tests.conftest import FinishedRun
from tests.retrieval.decisions.test_judge import calibration

METRICS = {"recall@1": 0.9, "auroc": 0.8, "auroc_knn": 0.7, "auprc_knn": None, "seconds_training": 3.0}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))


def encoder() -> lam.BayesianEncoder:
    return lam.fit(network(), [(torch.randn(32, 6), torch.arange(32) % 4)], margin=0.7, progress=False)


def published(folder: Path, made: Calibration | None) -> HubEncoder:
    hub = HubEncoder.of(encoder(), made, METRICS)
    hub.save_pretrained(folder)
    return hub


def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path) -> None:
    hub = published(tmp_path / "repository", calibration())
    loaded = HubEncoder.from_pretrained(tmp_path / "repository", network=network())
    inputs = torch.randn(5, 6)
    assert torch.equal(loaded.encoder.embed(inputs).mean, hub.encoder.embed(inputs).mean)
    assert torch.equal(loaded.encoder.embed(inputs).kappa, hub.encoder.embed(inputs).kappa)
    assert loaded.calibration is not None
    assert loaded.calibration.accept_above == calibration().accept_above
    assert loaded.metrics == METRICS
    files = [path.name for path in (tmp_path / "repository").rglob("*") if path.is_file()]
    assert not [name for name in files if name.endswith((".bin", ".pkl", ".pt", ".pth"))]


def test_a_download_of_links_is_read_and_saved_again(tmp_path: Path) -> None:
    published(tmp_path / "blobs", calibration())
    for path in (tmp_path / "blobs").rglob("*"):  # the cache of the Hub holds links to its files
        link = tmp_path / "snapshot" / path.relative_to(tmp_path / "blobs")
        if path.is_file():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    loaded = HubEncoder.from_pretrained(tmp_path / "snapshot", network=network())
    loaded.save_pretrained(tmp_path / "again")
    assert HubEncoder.from_pretrained(tmp_path / "again", network=network()).calibration is not None


def test_the_calibration_of_another_encoder_is_not_published(tmp_path: Path) -> None:
    published(tmp_path / "repository", calibration())
    loaded = HubEncoder.from_pretrained(tmp_path / "repository", network=network())
    with pytest.raises(ValueError, match="calibration is.*another encoder"):
        published(tmp_path / "other", loaded.calibration)
    assert not (tmp_path / "other").exists()


def test_altered_files_other_networks_and_other_calibrations_are_an_error(tmp_path: Path) -> None:
    published(tmp_path / "repository", calibration())
    with pytest.raises(ValueError, match="network"):
        HubEncoder.from_pretrained(tmp_path / "repository")
    with pytest.raises(ValueError, match="network differs"):
        HubEncoder.from_pretrained(tmp_path / "repository", network=nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 8)))
    published(tmp_path / "other", calibration())
    shutil.rmtree(tmp_path / "other" / "calibration")
    shutil.copytree(tmp_path / "repository" / "calibration", tmp_path / "other" / "calibration")
    with pytest.raises(ValueError, match="of another network"):
        HubEncoder.from_pretrained(tmp_path / "other", network=network())
    with pytest.raises(ValueError, match="holds the calibration"):
        published(tmp_path / "other", None)
    weights = next((tmp_path / "repository" / "encoder").rglob("network*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptFileError, match="network"):
        HubEncoder.from_pretrained(tmp_path / "repository", network=network())


@pytest.mark.parametrize(
    ("calibrated", "metrics", "message"),
    [
        (False, METRICS, "holds the calibration"),
        (True, {"recall@1": float("nan")}, "metrics.*got nan for 'recall@1'"),
    ],
)
def test_a_refused_save_leaves_the_repository_as_it_was(
    tmp_path: Path, calibrated: bool, metrics: dict[str, float], message: str
) -> None:
    published(tmp_path, calibration())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        HubEncoder.of(encoder(), calibration() if calibrated else None, metrics).save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_encoder_that_cannot_be_saved_leaves_the_repository_as_it_was(tmp_path: Path) -> None:
    hub = published(tmp_path, calibration())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    hub.encoder = copy(hub.encoder)
    hub.encoder.n_samples = 1
    with pytest.raises(ValueError, match="n_samples.*2.*1"):
        hub.save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_save_over_the_card_of_another_encoder_warns(tmp_path: Path) -> None:
    hub = published(tmp_path, calibration())
    hub.save_pretrained(tmp_path)  # the same card, without a warning
    hub.metrics = {"recall@1": 0.1}
    with pytest.warns(UserWarning, match="differs.*card of this"):
        hub.save_pretrained(tmp_path)


def test_the_card_has_both_tables_promises_and_limits(tmp_path: Path) -> None:
    published(tmp_path / "repository", calibration())
    card = (tmp_path / "repository" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: lam\n")
    assert "| 0.9 | ↑ higher is better |" in card
    assert "## Metrics by score" in card
    rows = [line for line in card.splitlines() if line.startswith(f"| {SCORES['kappa'].name} | ")]
    assert rows == [f"| {SCORES['kappa'].name} | 0.8 |  |"]  # `auroc` is for the encoder's own score
    assert "At most 0.05 of queries without a match are answered" in card
    assert "## Limits\n\n- The rates assume" in card
    published(tmp_path / "bare", None)
    assert "None: this encoder has no calibration" in (tmp_path / "bare" / "README.md").read_text(encoding="utf-8")


def test_the_card_of_a_network_without_uncertainty_claims_no_kappa(tmp_path: Path) -> None:
    bare = DeterministicEncoder(network(), "2")
    for one, claims in ((bare, False), (encoder(), True)):
        assert ("concentration" in str(HubEncoder.of(one).generate_model_card())) == claims


@pytest.mark.usefixtures("as_in_production")
def test_a_network_and_a_whole_evaluation_are_an_error() -> None:
    other: Any = network()
    with pytest.raises(ValueError, match="encoder.*lam.Encoder"):
        HubEncoder.of(other)
    with pytest.raises(ValueError, match="metrics.*dict"):
        HubEncoder.of(encoder(), metrics=lam.evaluate(encoder(), (torch.randn(8, 6), torch.arange(8) % 2)))


def test_a_run_is_published_with_its_own_numbers(finished_run: FinishedRun, tmp_path: Path) -> None:
    hub = HubEncoder.from_run(finished_run.folder)
    hub.save_pretrained(tmp_path / "repository")
    loaded = HubEncoder.from_pretrained(tmp_path / "repository")
    assert loaded.metrics == hub.metrics
    card = (tmp_path / "repository" / "README.md").read_text(encoding="utf-8")
    for part in ("## Metrics\n", "## Metrics by score", "| AUROC", "this encoder has no calibration"):
        assert part in card

"""Hugging Face Hub: an encoder and its calibration as a repository, with a model card.

A repository holds the folders `encoder/` and `calibration/` as lam saves them: safetensors and JSON with hashes, no
pickle. Loading checks the hashes before it parses a file, and rejects a network with other tensors or shapes.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from lam.encoders.base import Encoder
from lam.encoders.files import fingerprint
from lam.encoders.load import load
from lam.retrieval import METRICS, SCORES, Calibration, load_calibration, save_calibration
from lam.retrieval.decisions.files import FOLDER
from lam.retrieval.metrics.registry import OWN, Key
from lam.runs import folder as run_folder
from lam.runs.calibration_report import describe_calibration
from lam.runs.finished import Run
from lam.utils.extras import needs_extra
from lam.utils.files import read_json, write_json

with needs_extra("hub", "the Hugging Face Hub"):
    from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download

_ENCODER, _CONFIG = "encoder", "config.json"
_HASH = re.compile("[0-9a-f]{64}")  # of an encoder's files, the key of a run's or a repository's calibration
_LIMITS = (
    "The rates assume that new queries come from the source of the calibration data; drift breaks them.",
    "They hold for the calibrated gallery, up to ±20 % of its size.",
    "A calibration belongs to this encoder alone: another network, posterior or preprocessing needs its own.",
    "κ is the uncertainty of an embedding, not the probability of a right answer.",
)


class HubEncoder(ModelHubMixin, library_name="lam", tags=["uncertainty", "retrieval"]):
    """An encoder, its calibration and its metrics, with `save_pretrained`, `from_pretrained` and `push_to_hub`.

    Attributes:
        calibration: thresholds and probabilities; None without a calibration.
        metrics: metrics of an evaluation for the model card, by the keys of `metrics.json`.
    """

    encoder: Encoder
    calibration: Calibration | None = None
    metrics: Mapping[str, float | int | None] = {}

    @classmethod
    def of(cls, encoder: Encoder, calibration: Calibration | None = None, metrics: Any = None) -> "HubEncoder":
        """A `HubEncoder` with these attributes; a `ValueError` for another kind of encoder or metrics."""
        if not isinstance(encoder, Encoder):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"encoder must be a lam.Encoder, got {type(encoder).__name__}: lam.fit makes one")
        if not isinstance(metrics, Mapping | None):
            raise ValueError(f"metrics must be a dict, got {type(metrics).__name__}: give evaluation.metrics")
        hub = cls()
        hub.encoder, hub.calibration, hub.metrics = encoder, calibration, metrics or {}
        return hub

    @classmethod
    def from_run(cls, folder: str | Path) -> "HubEncoder":
        """Encoder, calibration and metrics of a finished run; errors as in `lam.runs.finished.Run`."""
        run = Run(folder)
        return cls.of(run.encoder, run.calibration, read_json(run.folder / run_folder.METRICS))

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Write the repository, with options of `ModelHubMixin`. A model card that differs stays, with a warning.

        Raises:
            ValueError: if the folder holds a calibration and this encoder has none, for a calibration of another
                encoder, for a metric that is neither finite nor None, and as `Encoder.save`. The folder then stays as
                it was.
        """
        folder = Path(save_directory)
        if self.calibration is None and (folder / FOLDER).exists():  # the mixin's method first deletes config.json
            raise ValueError(f"{folder} holds the calibration of another encoder: save to another folder")
        if self.calibration is not None and _HASH.fullmatch(self.calibration.key):  # else the key is a user's name
            with TemporaryDirectory() as saved:
                self.encoder.save(saved)
                if fingerprint(saved) != self.calibration.key:
                    raise ValueError("the calibration is of another encoder: calibrate again with this one")
        for key, value in self.metrics.items():
            if isinstance(value, Real) and not math.isfinite(value):
                raise ValueError(f"metrics must be finite, or None where undefined, got {value} for {key!r}")
        card = folder / "README.md"
        if card.exists() and card.read_text(encoding="utf-8") != str(self.generate_model_card()):
            warnings.warn(
                f"{card} differs from the card of this encoder and stays as it is: delete it for a new one, or check "
                "its metrics and promises",
                stacklevel=2,
            )
        config = folder / _CONFIG
        old = config.read_bytes() if config.exists() else None
        try:
            return super().save_pretrained(save_directory, **options)
        except BaseException:
            if old is not None:
                config.write_bytes(old)
            raise

    def _save_pretrained(self, save_directory: Path) -> None:
        self.encoder.save(save_directory / _ENCODER)
        if self.calibration is not None:  # its key is the hash of the encoder's files, which are new
            save_calibration(save_directory, replace(self.calibration, key=fingerprint(save_directory / _ENCODER)))
        write_json(save_directory / _CONFIG, {"library_name": "lam", "metrics": dict(self.metrics)})

    @classmethod
    def _from_pretrained(cls, *, model_id: str, network: nn.Module | None = None, **download: Any) -> "HubEncoder":
        """Read a folder, or download a repository; `network` as in `lam.load`."""
        folder = Path(model_id)
        if not folder.is_dir():
            patterns = [f"{_ENCODER}/**", f"{FOLDER}/**", _CONFIG]
            folder = Path(snapshot_download(model_id, allow_patterns=patterns, **download))
        encoder, calibration = load(folder / _ENCODER, network), None
        if (folder / FOLDER).is_dir():
            calibration = load_calibration(folder, key=fingerprint(folder / _ENCODER))
        return cls.of(encoder, calibration, read_json(folder / _CONFIG).get("metrics"))

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """A card with the metrics, the metrics by score, the promised rates and their limits."""
        header = self._hub_mixin_info.model_card_data.to_yaml()
        return ModelCard(f"---\n{header}\n---\n\n" + "\n".join(self._card()))

    def _card(self) -> Iterator[str]:
        yield "# A retrieval network that knows how sure it is\n"
        kind = f"`{self.encoder.kind}`, {self.encoder.dimension} dimensions"
        yield f"An encoder of lam, distribution `lam-retrieval` ({kind})."
        if self.encoder.has_kappa:
            yield "Every embedding is a von Mises-Fisher distribution with a concentration κ."
        yield "\n```python\nfrom lam.integrations.hub import HubEncoder\n"
        yield 'hub = HubEncoder.from_pretrained("OWNER/NAME")  # or a folder\nhub.encoder, hub.calibration\n```\n'
        yield from _metric_table(self.metrics)
        yield from _score_table(self.metrics, self.encoder.ood_score)
        yield "## Promises\n"
        lines = () if self.calibration is None else _promises(self.calibration)
        yield from lines or ("None: this encoder has no calibration.",)
        yield "\n## Limits\n"
        yield from (f"- {limit}" for limit in _LIMITS)
        yield ""


def _promises(calibration: Calibration) -> tuple[str, ...]:
    """Lines with the promised rates of a calibration; for a run's calibration, also the output of `lam calibrate`."""
    targets = calibration.targets
    rates = [
        f"- At most {targets.far:g} of queries without a match are answered.",
        f"- At most {targets.ood:g} of known queries are flagged.",
        f"- Gallery: {calibration.gallery_size} items.",
    ]
    if targets.wrong is not None:
        rates.append(f"- At most {targets.wrong:g} of the answers are wrong, with confidence 0.95.")
    words = ("\n```", *describe_calibration(calibration), "```") if "queries" in calibration.facts else ()
    return *rates, *words


def _metric_table(metrics: Mapping[str, float | int | None]) -> Iterator[str]:
    """A table of the metrics that do not depend on a score."""
    rows = {key: METRICS[key] for key in metrics if key in METRICS and METRICS[key].by_score is None}
    if rows:
        yield "## Metrics\n\n| metric | value | |\n| --- | --- | --- |"
        yield from (f"| {metric.name} | {_shown(metrics[key])} | {metric.reading} |" for key, metric in rows.items())
        yield ""


def _score_table(metrics: Mapping[str, float | int | None], own: str) -> Iterator[str]:
    """A table with a row for each score and a column for each metric by score, for the first OOD set.

    `own` is the encoder's own score, which keys such as `auroc` omit.
    """
    cells: dict[str, dict[str, float | int | None]] = {}
    for key, (metric, score, ood_set) in ((key, Key.parse(key)) for key in metrics):
        by = METRICS[metric].by_score if metric in METRICS else None
        if by is not None and not ood_set:
            cells.setdefault(score or (own if by == OWN else by), {})[metric] = metrics[key]
    if columns := [name for name in METRICS if any(name in row for row in cells.values())]:
        yield "## Metrics by score\n\n| score | " + " | ".join(METRICS[name].name for name in columns) + " |"
        yield "| --- " * (len(columns) + 1) + "|"
        for score, row in cells.items():
            title = SCORES[score].name if score in SCORES else score
            yield f"| {title} | " + " | ".join(_shown(row.get(name)) for name in columns) + " |"
        yield ""


def _shown(value: float | int | None) -> str:
    return "" if value is None else f"{value:.4g}"

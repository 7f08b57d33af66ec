"""Questions of no known intent: CLINC150's out of scope, compared with published results, and left-out intents.

    python benchmarks/intents.py --data FOLDER [--features FILE] [--seeds 5] [--splits 10]

FOLDER holds `clinc150` and `banking77`. A frozen all-MiniLM-L6-v2 embeds each text once; all its layers are features,
which `--features` keeps. A linear head of 128 dimensions is trained on them by SupCon as in `lam run`. The gallery is
the training split. The calibration uses the validation split, which has no question of an unknown intent.

- `out_of_scope`: all 150 intents of CLINC150 are known. AUROC and AUPRC of the 1,000 questions out of scope by every
  score, and ECE of the probability that the predicted intent is right; a question out of scope counts as wrong. The
  expected share of strangers is the default, a half, or 0.05.
- `open_intent`: 25, 50 or 75 % of the intents are known, drawn anew in each split. Unknown intents form one more class:
  accuracy over all classes, and F1 of this class. Score and share of flagged known questions are chosen once for all,
  by the accuracy on validation splits, in which half of the known intents stand in for unknown ones.
- `strangers`: a tenth of the intents is held out of training, to promise false accepts of other unseen intents at
  several rates. Also the share of known questions answered by this cosine, and by the cosine of the plain sentence
  embedding at the same rate; and both without the questions that `combined` flags.
- `cost_of_setting_aside`: recall@1 of test questions in a gallery of all intents, for trained intents and for
  held-out intents, compared with a head trained on all intents.
- `losses_NAME`: recall@1 of the encoder's plain embedding, and of heads on all layers trained by the contrastive loss
  and by SupCon.
- `layers_NAME`: a head on all layers, compared with a head on the last layer's embedding, for both sets of
  questions and sentences of Python's standard library: recall@1, and AUROC of strangers by `combined`. `few_NAME` is
  the same with 30 intents of 10 training questions each.

Writes results/intents.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from strangers import OOD_TARGET, inside, smallest_rate
from timing import kept, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lam
from lam import datasets, losses, models
from lam.encoders.base import N_SAMPLES, Encoder
from lam.models import EmbeddingNetwork
from lam.retrieval.decisions.calibrate import CalibrationData, Choices, calibrate
from lam.retrieval.decisions.calibration import Targets
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.flags import COMBINED
from lam.retrieval.decisions.probability import probability_bins
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.ood import auprc, auroc
from lam.retrieval.metrics.open_set import search_open_set
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.uncertainty import r_auroc
from lam.runs.sweep import summary
from lam.training import Training, train

DIMENSION, DROPOUT, EPOCHS, BATCH_SIZE, MARGIN = 128, 0.5, 30, 256, 0.7
EMBEDDING = slice(-384, None)
"""The encoder's own embedding, its last layer, among the features."""
REFERENCE = 5000
FRACTIONS = 0.25, 0.5, 0.75
RATES = 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25
TARGETS = Targets(far=0.2, ood=0.2, conformal_miss=0.2)  # no threshold of these is used
ANSWER, EXPECTING, SHARE = "p_right", "p_right_expecting_strangers", 0.05
PARTS = "train", "validation", "test"
TEXTS = {"clinc150": "clinc150_oos", "banking77": "clinc150_oos", "docstrings": "descriptions"}
"""The strangers of each data set."""
FEW = {"intents": 30, "train": 10, "validation": 5, "test": 20}


@dataclass(frozen=True)
class Part:
    """Features and labels of questions."""

    features: Tensor
    labels: Tensor

    def of(self, classes: Tensor) -> "Part":
        """The items of some classes."""
        rows = torch.isin(self.labels, classes)
        return Part(self.features[rows], self.labels[rows])


class Labelled(TensorDataset):
    """A data set with the attribute `labels`, from which the loop draws its batches."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.features, part.labels)
        self.labels = part.labels


def trained_head(training: Part, seed: int, loss: str = "supcon") -> EmbeddingNetwork:
    """A head as `lam run` trains it."""
    torch.manual_seed(seed)
    network = EmbeddingNetwork(nn.Dropout(DROPOUT), nn.Linear(training.features.shape[1], DIMENSION))
    options: Any = {"epochs": EPOCHS, "batch_size": BATCH_SIZE, "seed": seed, "progress": False}
    train(network, Labelled(training), Training(loss=losses.build(loss, margin=MARGIN), **options))
    return network.eval()


class Cell:
    """A head trained on some intents, with a posterior, calibrated on questions of these intents."""

    def __init__(self, training: Part, validation: Part, seed: int) -> None:
        network = trained_head(training, seed)
        batches = list(zip(training.features.split(BATCH_SIZE), training.labels.split(BATCH_SIZE), strict=True))
        self.encoder: Encoder = lam.fit(network, batches, margin=MARGIN, seed=seed, progress=False)
        self.stored, self.gallery = training.labels, self.encoder.embed(training.features)
        rows = torch.randperm(len(self.stored), generator=torch.Generator().manual_seed(seed))[:REFERENCE]
        known, labels = self.encoder.predict([validation.features], n_samples=N_SAMPLES), validation.labels
        self.searches = search_open_set(
            known.embeddings.mean, self.gallery.mean, lambda rows: labels[rows][:, None] == self.stored
        )
        self.data = CalibrationData(
            self.searches,
            known.embeddings,
            known.features,
            validation.labels,
            gallery_labels=self.stored,
            reference=Reference.of(training.features[rows], self.stored[rows]),
        )
        self.calibration = calibrate(self.data, Choices(TARGETS), key="")

    def ask(self, features: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Doubt by every score and by P(right), and the intent of the first hit, for questions."""
        asked = self.encoder.predict([features], n_samples=N_SAMPLES)
        none = torch.zeros(1, len(self.stored), dtype=torch.bool)
        found = search_open_set(asked.embeddings.mean, self.gallery.mean, lambda rows: none.expand(len(rows), -1))
        hits = Hits(found.hits, found.cosines, self.gallery.kappa[found.hits])
        of_hits = self.stored[found.hits]
        scores = self.calibration.scores(hits, asked.embeddings, features=asked.features, labels=of_hits)
        doubt = {**scores, ANSWER: 1 - self.calibration.match_probability(scores)}
        return {**doubt, COMBINED: self.calibration.detector.ood_score(COMBINED, scores)}, of_hits[:, 0]


def out_of_scope(parts: dict[str, Part], outside: Tensor, seed: int) -> dict[str, float]:
    began = time.process_time()
    cell, test = Cell(parts["train"], parts["validation"], seed), parts["test"]
    (doubt, predicted), (foreign, _) = cell.ask(test.features), cell.ask(outside)
    seconds = time.process_time() - began
    expecting = calibrate(cell.data, Choices(TARGETS, share=SHARE), key="").match_probability
    for scores in (doubt, foreign):
        scores[EXPECTING] = 1 - expecting(scores)
    correct = predicted == test.labels
    measured = {"recall@1": float(correct.double().mean()), "seconds": seconds}
    for name, values in doubt.items():
        measured[f"auroc_{name}"] = auroc(values, foreign[name])
        measured[f"auprc_{name}"] = auprc(values, foreign[name])
        measured[f"r_auroc_{name}"] = r_auroc(correct, values)
    right = torch.cat([correct, torch.zeros(len(outside), dtype=torch.bool)])
    for name in (ANSWER, EXPECTING):
        probability = 1 - torch.cat([doubt[name], foreign[name]])
        measured[f"ece_with_out_of_scope_{name}"] = probability_bins(probability, right).expected_error
        measured[f"ece_{name}"] = probability_bins(1 - doubt[name], correct).expected_error
    return measured


def opened(cell: Cell, known: Part, unknown: Tensor, limits: Part) -> dict[tuple[str, float], tuple[float, float]]:
    """Accuracy and F1 of the unknown intents, by score and by share of flagged known questions."""
    of_limits, (doubt, predicted), (foreign, _) = (
        cell.ask(limits.features)[0],
        cell.ask(known.features),
        cell.ask(unknown),
    )
    correct, measured = predicted == known.labels, {}
    for name, values in doubt.items():
        for rate in RATES:
            above = ConformalScores.of(of_limits[name]).threshold(rate)
            kept, caught = values <= above, foreign[name] > above
            hits = float(caught.sum())
            accuracy = (float((correct & kept).sum()) + hits) / (len(kept) + len(caught))
            f1 = 2 * hits / (len(caught) + hits + float((~kept).sum()))
            measured[name, rate] = accuracy, f1
    return measured


def chosen(sources: dict[str, dict[str, Part]]) -> tuple[str, float]:
    """The score and the rate with the highest accuracy, if half of the known intents stand in for unknown ones."""
    total: dict[tuple[str, float], float] = {}
    for parts in sources.values():
        for fraction in FRACTIONS:
            for split in range(3):
                known = drawn(parts, fraction, split)
                rest, playing = known.chunk(2)
                cell = Cell(parts["train"].of(rest), parts["validation"].of(rest), split)
                validation = parts["validation"]
                limits = validation.of(rest)
                for setting, (accuracy, _) in opened(cell, limits, validation.of(playing).features, limits).items():
                    total[setting] = total.get(setting, 0) + accuracy
    return max(total, key=lambda setting: total[setting])


def drawn(parts: dict[str, Part], fraction: float, split: int) -> Tensor:
    classes = parts["train"].labels.unique()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(split))
    return classes[order[: round(fraction * len(classes))]]


def open_intent(
    parts: dict[str, Part], outside: Tensor | None, fraction: float, split: int, setting: tuple[str, float]
) -> dict[str, float]:
    known = drawn(parts, fraction, split)
    cell, test = Cell(parts["train"].of(known), parts["validation"].of(known), split), parts["test"]
    unknown = test.features[~torch.isin(test.labels, known)]
    unknown = unknown if outside is None else torch.cat([unknown, outside])
    measured = opened(cell, test.of(known), unknown, parts["validation"].of(known))
    (accuracy, f1), (plain, plain_f1) = measured[setting], measured["cosine", setting[1]]
    return {"accuracy": accuracy, "f1_open": f1, "accuracy_cosine": plain, "f1_open_cosine": plain_f1}


def strangers(parts: dict[str, Part], split: int) -> dict[str, float]:
    """False accepts of unseen intents at rates that other intents, held out of training, promise."""
    classes = parts["train"].labels.unique()
    order = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(split))]
    n = round(0.1 * len(classes))
    aside, unseen, known = order[:n], order[n : 2 * n], order[2 * n :]
    cell, test = Cell(parts["train"].of(known), parts["validation"].of(known), split), parts["test"]
    of_aside = [parts[name].of(aside) for name in PARTS]
    held = Part(torch.cat([part.features for part in of_aside]), torch.cat([part.labels for part in of_aside]))
    rate = smallest_rate(n)
    gallery = F.normalize(parts["train"].of(known).features[:, EMBEDDING])
    unusual = cell.calibration.detector.conformal_scores(COMBINED).threshold(OOD_TARGET)
    measured: dict[str, float] = {"promised": rate, "classes": float(n)}

    def plain(features: Tensor) -> Tensor:
        return (F.normalize(features[:, EMBEDDING]) @ gallery.T).amax(1)

    for name, score in (("lam", lambda features: -cell.ask(features)[0]["cosine"]), ("plain", plain)):
        limit = ConformalScores.of(score(held.features), held.labels).threshold(rate)
        for figure, matched, classes in (("false_accepts", "false_matches", unseen), ("answered", "matched", known)):
            questions = test.of(classes).features
            accepted = score(questions) > limit
            measured[f"{figure}_{name}"] = float(accepted.double().mean())
            if name == "lam":
                unflagged = cell.ask(questions)[0][COMBINED] <= unusual
                measured[f"{matched}_{name}"] = float((accepted & unflagged).double().mean())
    from_known = cell.calibration.false_accepts.threshold(rate)
    accepted = -cell.ask(test.of(unseen).features)[0]["cosine"] > from_known
    measured["false_accepts_of_known_classes_alone"] = float(accepted.double().mean())
    return measured


def cost_of_setting_aside(parts: dict[str, Part], seed: int) -> dict[str, float]:
    """Recall@1 in a gallery of all intents, by a head trained on all intents, and by a head trained on nine tenths."""
    classes, test = parts["train"].labels.unique(), parts["test"]
    order = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))]
    n = round(0.1 * len(classes))
    aside, known = order[:n], order[n:]
    measured: dict[str, float] = {}
    for name, of in (("all", classes), ("without_strangers", known)):
        encoder = Cell(parts["train"].of(of), parts["validation"].of(of), seed).encoder
        gallery, queries = (encoder.embed(parts[part].features).mean for part in ("train", "test"))
        right = parts["train"].labels[(queries @ gallery.T).argmax(1)] == test.labels
        for queries_of, rows in (("known", torch.isin(test.labels, known)), ("aside", torch.isin(test.labels, aside))):
            measured[f"recall_{queries_of}_{name}"] = float(right[rows].double().mean())
    return measured


def of_layers(parts: dict[str, Part], outside: Tensor, seed: int) -> dict[str, float]:
    """Recall@1 and AUROC of strangers, by a head on the last layer's embedding and by a head on all layers."""
    measured: dict[str, float] = {}
    for name, columns in (("last", EMBEDDING), ("all", slice(None))):
        train_part, validation, test = (Part(parts[p].features[:, columns], parts[p].labels) for p in PARTS)
        cell = Cell(train_part, validation, seed)
        (doubt, predicted), (foreign, _) = cell.ask(test.features), cell.ask(outside[:, columns])
        measured[f"recall@1_{name}"] = float((predicted == test.labels).double().mean())
        measured[f"auroc_{name}"] = auroc(doubt[COMBINED], foreign[COMBINED])
    return measured


def of_losses(parts: dict[str, Part], seed: int) -> dict[str, float]:
    """Recall@1 of the plain embedding, and of heads on all layers by either loss."""
    gallery, test = parts["train"], parts["test"]

    def recall(embed: Callable[[Tensor], Tensor]) -> float:
        found = (embed(test.features) @ embed(gallery.features).T).argmax(1)
        return float((gallery.labels[found] == test.labels).double().mean())

    measured = {"recall@1_plain": recall(lambda features: F.normalize(features[:, EMBEDDING]))}
    for loss in ("contrastive", "supcon"):
        network = trained_head(gallery, seed, loss)
        with torch.no_grad():
            measured[f"recall@1_{loss}"] = recall(network)
    return measured


def few(parts: dict[str, Part], seed: int) -> dict[str, Part]:
    """Random intents, new for each seed, and some questions of each."""
    classes = parts["train"].labels.unique()
    drawn = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))[: FEW["intents"]]]

    def some(part: Part, n: int) -> Part:
        rows = torch.cat([(part.labels == label).nonzero()[:n, 0] for label in drawn])
        return Part(part.features[rows], part.labels[rows])

    return {name: some(parts[name], FEW[name]) for name in PARTS}


def embedded(folder: Path) -> dict[str, Any]:
    """Features of all layers of the frozen encoder for the texts of all data sets, by split."""
    frozen = models.build("sentence-transformers:all-MiniLM-L6-v2", dimension=DIMENSION).features.eval()

    def features(items: Any) -> Tensor:
        return torch.cat([frozen(batch[0]) for batch in DataLoader(items, batch_size=1024)])

    made: dict[str, Any] = {}
    splits = {name: datasets.load(name, root=folder / name) for name in ("clinc150", "banking77")}
    splits["docstrings"] = datasets.load("docstrings")
    for name, of in splits.items():
        for part, items in of.parts().items():
            made[f"{name}_{part}"] = {"features": features(items), "labels": items.labels}
    made["clinc150_oos"] = features(datasets.intents.clinc150_oos(root=folder / "clinc150"))
    made["descriptions"] = features(datasets.docstrings.descriptions(like=splits["docstrings"].train))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--features", type=Path, default=Path("runs/intents.pt"), help="where embeddings are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--strangers", type=int, default=20, help="splits of the promise about strangers")
    parser.add_argument("--aside-seeds", type=int, default=5, help="of what setting intents aside costs")
    parser.add_argument("--layer-seeds", type=int, default=5, help="of heads on the last layer and on all")
    parser.add_argument("--loss-seeds", type=int, default=5, help="of heads by either loss")
    parsed = parser.parse_args()
    if not parsed.features.is_file():
        parsed.features.parent.mkdir(parents=True, exist_ok=True)
        torch.save(embedded(parsed.data), parsed.features)
    stored = torch.load(parsed.features)
    texts = {name: {part: Part(**stored[f"{name}_{part}"]) for part in PARTS} for name in TEXTS}
    sources = {name: texts[name] for name in ("clinc150", "banking77")}
    outside = stored["clinc150_oos"]

    def keep(name: str, result: Any) -> None:
        write("intents", {**kept("intents"), name: result})
        print(name, json.dumps(result)[:2000], file=sys.stderr, flush=True)

    if parsed.seeds:
        rows = {seed: out_of_scope(sources["clinc150"], outside, seed) for seed in range(parsed.seeds)}
        keep("out_of_scope", {"seeds": rows, **summary(rows)})
    if parsed.strangers:
        for name, parts in sources.items():
            rows = {split: strangers(parts, split) for split in range(parsed.strangers)}
            keep(f"strangers_{name}", {**inside(rows), "seeds": rows, **summary(rows)})
    if parsed.aside_seeds:
        for name, parts in sources.items():
            rows = {seed: cost_of_setting_aside(parts, seed) for seed in range(parsed.aside_seeds)}
            keep(f"cost_of_setting_aside_{name}", {"seeds": rows, **summary(rows)})
    if parsed.layer_seeds:
        for name, parts in texts.items():
            rows = {seed: of_layers(parts, stored[TEXTS[name]], seed) for seed in range(parsed.layer_seeds)}
            keep(f"layers_{name}", {"seeds": rows, **summary(rows)})
        for name, parts in sources.items():
            rows = {seed: of_layers(few(parts, seed), outside, seed) for seed in range(parsed.layer_seeds)}
            keep(f"few_{name}", {"seeds": rows, **summary(rows)})
    if parsed.loss_seeds:
        for name, parts in texts.items():
            rows = {seed: of_losses(parts, seed) for seed in range(parsed.loss_seeds)}
            keep(f"losses_{name}", {"seeds": rows, **summary(rows)})
    if parsed.splits:
        setting = chosen(sources)
        keep("open_intent_setting", {"score": setting[0], "flagged": setting[1]})
        for name, parts in sources.items():
            for fraction in FRACTIONS:
                foreign = outside if name == "clinc150" else None
                rows = {split: open_intent(parts, foreign, fraction, split, setting) for split in range(parsed.splits)}
                keep(f"open_intent_{name}_{fraction}", {"seeds": rows, **summary(rows)})


if __name__ == "__main__":
    sys.exit(main())

"""Decisions on data that no default was chosen on, from `lam run` to `lam search`, as a user gets them.

    apt-get install oxygen-icon-theme gnome-icon-theme tango-icon-theme mate-icon-theme elementary-xfce-icon-theme \
        papirus-icon-theme breeze-icon-theme faenza-icon-theme moka-icon-theme numix-icon-theme deepin-icon-theme \
        suru-icon-theme obsidian-icon-theme adwaita-icon-theme lxde-icon-theme wordnet-base librsvg2-bin ufoai-textures
    python benchmarks/new_data.py --work FOLDER [--data icons definitions surfaces] [--seeds 0 1 2]

`icons` are pictures of 18 icon themes of Debian; the class is the icon's name, and the themes are by different artists.
`definitions` come from WordNet; the class is the lexicographer's file (animals, food, motion, ...). `surfaces` are
parts of photographs of walls, floors and ground, turned and in another light; the class is the photograph. lam never
sees some classes (`strangers`). Of the other classes, it trains on the items in `gallery`, indexes them, calibrates on
the items in `calibration` and searches for the items in `queries`, by its defaults. It also calibrates without
`calibration`, on the run's validation split.
"""

import argparse
import csv
import io
import random
import re
import subprocess
import zipfile
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from timing import kept, write

from lam.cli import main as lam
from lam.retrieval.metrics.ood import auroc
from lam.runs.search import search

ICONS, WORDNET = Path("/usr/share/icons"), Path("/usr/share/wordnet")
TEXTURES = Path("/usr/share/games/ufoai/base/0textures.pk3")
SURFACES = re.compile(r"textures/tex_(buildings|nature|material|mattn)/\w*(?<!_[nsgr]m)\.(jpg|png)")  # no normal maps
THEMES = (
    *("Adwaita", "Faba", "Faenza", "Moka", "Numix", "Obsidian", "Papirus", "Sea", "Tango", "Vintage"),
    *("bloom", "breeze", "elementary-xfce", "gnome", "mate", "nuoveXT2", "oxygen", "suru"),
)
KINDS = {"apps", "devices", "mimetypes", "mimes", "places", "categories"}
SIZE = 96  # pixels
OWN = ", validation split"


def icon_files() -> dict[str, list[Path]]:
    """The file of each theme by the icon's name, for names of at least five themes that are not aliases of others."""
    found = defaultdict[str, dict[str, tuple[tuple[bool, int], Path]]](dict)
    for theme in THEMES:
        for path in sorted((ICONS / theme).rglob("*")):
            parts = path.relative_to(ICONS / theme).parts
            if path.suffix not in (".png", ".svg") or "symbolic" in str(path) or not KINDS & set(parts):
                continue
            sizes = re.findall(r"(?<!\d)(\d{2,3})(?:x\d{2,3})?(?!\d)", "/".join(parts))
            size = 300 if "scalable" in parts else int(sizes[-1]) if sizes else 0
            rank = path.suffix == ".png" and size >= 64, size if size <= 256 else 0
            if size >= 48 and path.exists() and rank > found[path.stem].get(theme, ((False, -1), path))[0]:
                found[path.stem][theme] = rank, path.resolve()
    files = {name: [path for _, path in of.values()] for name, of in sorted(found.items()) if len(of) >= 5}
    names_of = defaultdict[Path, list[str]](list)
    for name, paths in files.items():
        for path in paths:
            names_of[path].append(name)
    for pair in sorted({pair for names in names_of.values() for pair in combinations(sorted(names), 2)}):
        if all(name in files for name in pair):  # two names of one file in some theme
            del files[min(pair, key=lambda name: len(files[name]))]
    return files


def picture(path: Path) -> Image.Image | None:
    """An icon on white; None for a damaged file."""
    source: Any = path
    if path.suffix == ".svg":
        drawn = subprocess.run(["rsvg-convert", f"-w{SIZE}", f"-h{SIZE}", path], capture_output=True, check=False)
        source = io.BytesIO(drawn.stdout)
    try:
        with Image.open(source) as file:
            icon = file.convert("RGBA").resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    except OSError:
        return None
    white = Image.new("RGBA", icon.size, "white")
    white.alpha_composite(icon)
    return white.convert("RGB")


def write_icons(folder: Path, seed: int) -> None:
    """Folders of classes for the four parts; equal pictures are written once."""
    names, seen, draw = icon_files(), set[bytes](), random.Random(seed)
    pictures = dict[str, list[Image.Image]]()
    for name, paths in names.items():
        new = {icon.tobytes(): icon for icon in map(picture, paths) if icon is not None}
        pictures[name] = [icon for pixels, icon in new.items() if pixels not in seen]
        seen |= new.keys()
    classes = [name for name, icons in pictures.items() if len(icons) >= 4]
    strange = set(draw.sample(classes, round(0.3 * len(classes))))
    for name in classes:
        draw.shuffle(icons := pictures[name])
        for number, icon in enumerate(icons):
            held_out = {0: "queries", 1: "calibration"} if len(icons) >= 6 else {}
            part = "strangers" if name in strange else held_out.get(number, "gallery")
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            icon.save(folder / part / name / f"{number}.png")


def write_definitions(folder: Path, seed: int) -> None:
    """Tables of the four parts, with at most 150 definitions of a class."""
    definitions, draw = defaultdict[str, set[str]](set), random.Random(seed)
    for kind in ("noun", "verb"):
        for line in (WORDNET / f"data.{kind}").read_text().splitlines():
            if not line.startswith(" "):
                definitions[f"{kind} {line.split()[1]}"].add(line.split("|")[1].split(";")[0].strip())
    classes = [name for name, of in sorted(definitions.items()) if len(of) >= 60]
    strange, rows = set(draw.sample(classes, 10)), defaultdict[str, list[tuple[str, str]]](list)
    for name in classes:
        for number, text in enumerate(draw.sample(sorted(definitions[name]), min(150, len(definitions[name])))):
            held_out = "queries" if number < 20 else "calibration" if number < 40 else "gallery"
            rows["strangers" if name in strange else held_out].append((text, name))
    folder.mkdir(parents=True)
    for part, of_part in rows.items():
        with (folder / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *of_part])


def photographs() -> list[Image.Image]:
    """The opaque photographs of at least 256 pixels, without near copies (means of 8 x 8 cells within 6 of 255)."""
    found, seen = list[Image.Image](), list[np.ndarray]()
    with zipfile.ZipFile(TEXTURES) as archive:
        for name in sorted(filter(SURFACES.fullmatch, archive.namelist())):
            picture = Image.open(io.BytesIO(archive.read(name)))
            if picture.mode not in ("RGB", "P") or "transparency" in picture.info or min(picture.size) < 256:
                continue
            picture = picture.convert("RGB")
            cells = np.asarray(picture.resize((8, 8), Image.Resampling.BOX), dtype=float)
            if cells.std() > 4 and all(abs(cells - other).mean() > 6 for other in seen):
                found.append(picture)
                seen.append(cells)
    return found


def photographed(picture: Image.Image, draw: random.Random) -> Image.Image:
    """A part of a picture, turned by up to 20 degrees, in another light and colour."""
    side = round(draw.uniform(0.4, 0.7) * min(picture.size))
    left, top = (draw.randrange(extent - side + 1) for extent in picture.size)
    part = picture.crop((left, top, left + side, top + side)).rotate(draw.uniform(-20, 20), Image.Resampling.BICUBIC)
    edge = side // 6  # the corners that the rotation leaves empty
    part = part.crop((edge, edge, side - edge, side - edge)).resize((2 * SIZE, 2 * SIZE), Image.Resampling.LANCZOS)
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        part = change(part).enhance(draw.uniform(0.6, 1.4))
    return part


def write_surfaces(folder: Path, seed: int) -> None:
    """Folders of 200 classes for the four parts, with ten pictures of each photograph."""
    draw = random.Random(seed)
    for number, picture in enumerate(draw.sample(photographs(), 200)):
        for item in range(10):
            held_out = "queries" if item < 2 else "calibration" if item < 4 else "gallery"
            part = folder / ("strangers" if number < 60 else held_out) / f"surface {number}"
            part.mkdir(parents=True, exist_ok=True)
            photographed(picture, draw).save(part / f"{item}.jpg", quality=draw.randrange(40, 95))


WRITERS = {"icons": write_icons, "definitions": write_definitions, "surfaces": write_surfaces}


def searched(run: Path, folder: Path, part: str) -> tuple[list[str], Any]:
    """The classes of a part's items, and what a search for them finds."""
    if (table := folder / f"{part}.csv").exists():
        with table.open(newline="") as file:
            texts, labels = zip(*list(csv.reader(file))[1:], strict=True)
        return list(labels), search(run, texts=texts, k=1)
    files = sorted((folder / part).glob("*/*"))
    return [file.parent.name for file in files], search(run, *files, k=1)


def measure(run: Path, folder: Path) -> dict[str, float]:
    """Rates and AUROCs of the decisions, and the ECE of the probability when half of all queries are strangers.

    Every query has a match. `auroc_right` is of right first hits against wrong ones and strangers, `auroc_stranger` of
    queries against strangers.
    """
    (labels, known), (_, strange) = (searched(run, folder, part) for part in ("queries", "strangers"))
    right = torch.tensor([hits[0].label == label for hits, label in zip(known.items, labels, strict=True)])
    figures: dict[str, float] = {
        "promised_far": known.calibration.targets.far,
        "promised_flags": known.calibration.targets.ood,
        "queries": len(labels),
        "strangers": len(strange.items),
        "recall@1": float(right.double().mean()),
        "false_accepts": float(np.mean([decision == "match" for decision in strange.decisions.decision])),
        "false_flags": float(np.mean([decision == "abstain" for decision in known.decisions.decision])),
    }
    scores = {
        "probability": (known.decisions.probability, strange.decisions.probability),
        "cosine": (known.hits.scores[:, 0], strange.hits.scores[:, 0]),
        "kappa": (known.queries.kappa, strange.queries.kappa),
    }
    for name, (of_known, of_strange) in scores.items():
        of_known, of_strange = (torch.as_tensor(score).double() for score in (of_known, of_strange))
        figures[f"auroc_right_{name}"] = auroc(-of_known[right], -torch.cat([of_known[~right], of_strange]))
        figures[f"auroc_stranger_{name}"] = auroc(-of_known, -of_strange)
    gaps = torch.zeros(10, dtype=torch.float64)  # of ten bins, where known queries and strangers weigh half each
    of_known, of_strange = (torch.as_tensor(score).double() for score in scores["probability"])
    for probability, is_right in ((of_known, right), (of_strange, torch.zeros(len(of_strange)))):
        bins = (10 * probability).long().clamp(max=9)
        gaps.index_add_(0, bins, (probability - is_right.double()) / (2 * len(probability)))
    return figures | {"ece_probability": float(gaps.abs().sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decisions on data that no default was chosen on.")
    parser.add_argument("--work", type=Path, required=True, help="folder for data and runs; finished runs are kept")
    parser.add_argument("--data", nargs="+", choices=WRITERS, default=list(WRITERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    for seed in options.seeds:
        for data in options.data:
            folder, run = options.work / f"{data}-{seed}", options.work / f"run-{data}-{seed}"
            if not folder.exists():
                WRITERS[data](folder, seed)
            suffix, kind, words = "", "folder", ["--network.name=efficientnet_lite0"]
            if data == "definitions":
                suffix, kind, words = ".csv", "texts", []
            gallery, calibration = (folder / f"{part}{suffix}" for part in ("gallery", "calibration"))
            words += [f"--data.root={gallery}", f"--seed={seed}", f"--output={run}"]
            assert lam(["run", kind, "laplace_posthoc", *words, "--quiet"]) == 0
            assert lam(["index", str(run), str(gallery), "--quiet"]) == 0
            for name, of in {f"{data}{OWN} {seed}": [], f"{data} {seed}": [f"--folder={calibration}"]}.items():
                assert lam(["calibrate", str(run), *of, "--quiet"]) == 0
                figures = {figure: round(value, 4) for figure, value in measure(run, folder).items()}
                write("new_data", {**kept("new_data"), name: figures})


if __name__ == "__main__":
    main()

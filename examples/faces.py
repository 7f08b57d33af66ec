"""Faces with strangers: is this person in the gallery?

    python examples/faces.py

Draws its people. Needs the extra `cpu`; writes faces.png.
"""

import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image, ImageDraw

from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.runs.config_files import load_config
from lam.runs.run import run
from lam.runs.search import search

folder = Path(tempfile.mkdtemp())


def draw(person: int, picture: int) -> Image.Image:
    """A face. The person decides its features, the picture its place, light and mood."""
    traits, scene = random.Random(person), random.Random(1000 * person + picture)
    skin, hair, eyes = ([traits.randint(low, low + 120) for _ in range(3)] for low in (120, 0, 0))
    width, gap, size = traits.uniform(11, 17), traits.uniform(4, 8), traits.uniform(1, 3)
    mouth, fringe = traits.uniform(3, 8), traits.uniform(2, 9)
    x, y, mood = 24 + scene.uniform(-3, 3), 24 + scene.uniform(-3, 3), scene.uniform(-2, 2)
    light = scene.uniform(0.8, 1.2)

    def colour(values: list[int]) -> tuple[int, ...]:
        return tuple(min(255, int(light * value)) for value in values)

    image = Image.new("RGB", (48, 48), colour([scene.randint(150, 255)] * 3))
    pen = ImageDraw.Draw(image)
    pen.ellipse((x - width, y - 18, x + width, y + 18), fill=colour(skin))
    pen.chord((x - width, y - 18, x + width, y + 18 - 2 * fringe), 180, 360, fill=colour(hair))
    for side in (-gap, gap):
        pen.ellipse((x + side - size, y - 3 - size, x + side + size, y - 3 + size), fill=colour(eyes))
    pen.line([(x - mouth, y + 9 - mood), (x, y + 9 + mood), (x + mouth, y + 9 - mood)], fill=colour([150, 40, 40]))
    return image


def save(people: range, name: str, pictures: range) -> None:
    """Pictures of some people, in a folder with a sub-folder for each person."""
    for person in people:
        place = folder / name / f"person-{person:03}"
        place.mkdir(parents=True)
        for picture in pictures:
            draw(person, picture).save(place / f"{picture:02}.png")


save(range(40), "people", range(12))  # the gallery
save(range(40, 100), "strangers", range(4))  # to calibrate with
save(range(40), "known", range(12, 15))  # new pictures of people in the gallery
save(range(100, 120), "unseen", range(3))  # people neither in training nor in calibration

# Train on the people, form the posterior, and promise that at most 5 % of the strangers are accepted.
settings = f"""--data.root={folder}/people --output={folder}/run --data.options.preprocessing.size=32
    --network.name=convnet32 --network.dimension=16 --training.epochs=10 --evaluation.corrupted=0""".split()
run(load_config("folder laplace_posthoc", settings), progress=False)
calibrate_run(folder / "run", CalibrationOptions({"far": 0.05}, strangers=folder / "strangers"), progress=False)

found = {name: search(folder / "run", folder / name, k=1) for name in ("known", "unseen")}

# The picture: some queries of both kinds, and the answers.
figure, panels = plt.subplots(2, 6, figsize=(10, 4.4), layout="constrained")
for row, (name, answers) in zip(panels, found.items(), strict=True):
    decisions = answers.decisions
    assert decisions is not None  # the run is calibrated
    print(f"{name}: {decisions.share('match'):.0%} are answered as people in the gallery")
    for place, panel in enumerate(row):
        query = place * 10
        panel.imshow(Image.open(answers.images[query]))
        panel.set_title(f"{decisions.decision[query]}\n{answers.items[query][0].label}?", fontsize=9)
        panel.axis("off")
figure.suptitle("Above: people in the gallery. Below: strangers.")
figure.savefig("faces.png", dpi=110)

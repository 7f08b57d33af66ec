"""Serve a gallery of digits, and ask it over HTTP.

    python examples/serving.py

Needs the extras `cpu` and `serve`; writes serving.png.
"""

import io
import json
import subprocess
import sys
import tempfile
from urllib.request import Request, urlopen

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.runs.config_files import load_config
from lam.runs.run import run

# A run on the digits 0 to 7. Its test split is the gallery; 8 and 9 are strangers.
folder = f"{tempfile.mkdtemp()}/run"
settings = [f"--output={folder}", "--training.epochs=10", "--network.dimension=8", "--evaluation.corrupted=0"]
run(load_config("digits laplace_posthoc", settings), progress=False)
calibrate_run(folder, CalibrationOptions({"far": 0.05, "ood": 0.05}), progress=False)

# The service, as `lam serve` starts it, on a free port. It prints its address when it is ready.
service = subprocess.Popen(
    [sys.executable, "-m", "lam", "serve", folder, "--port", "0"], stdout=subprocess.PIPE, text=True
)
assert service.stdout is not None
address = next(word.strip(",/") for line in service.stdout for word in line.split() if word.startswith("http://"))


def ask(pixels: np.ndarray) -> dict:
    """The answer to an image: the decision, its probability and the nearest items."""
    file = io.BytesIO()
    Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(file, "PNG")
    url = f"{address}/v1/search?k=1"
    with urlopen(Request(url, file.getvalue(), {"Content-Type": "image/png"})) as response:
        return json.load(response)


try:
    digits = load_digits()
    queries = [digits.images[digits.target == number][-1] for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)]
    answers = [ask(query) for query in queries]
finally:
    service.terminate()
    service.wait()

# The picture: each query, and what the service answers.
figure, panels = plt.subplots(2, 5, figsize=(9, 4.5), layout="constrained")
for panel, query, answer in zip(panels.flat, queries, answers, strict=True):
    hit = answer["hits"][0]
    print(answer["decision"], f"{answer['probability']:.2f}", hit["label"])
    panel.imshow(query, cmap="gray_r")
    panel.set_title(f"{answer['decision']}: {hit['label']}?\nprobability {answer['probability']:.2f}", fontsize=9)
    panel.axis("off")
figure.suptitle("The network never saw 8 and 9")
figure.savefig("serving.png", dpi=110)

"""Questions and answers: which module of Python's standard library does it, or none of them?

    python examples/questions.py

Needs the extras `cpu` and `text`; writes questions.png.
"""

import tempfile

import matplotlib.pyplot as plt

from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.runs.config_files import load_config
from lam.runs.run import run
from lam.runs.search import search

QUESTIONS = [
    "copy a whole directory",
    "compress data in gzip format",
    "on which weekday does a month begin?",
    "draw a random number",
    "run a command and return its output",
    "the mean and the median of some numbers",
    "send a mail message",
    "split a string at a pattern",
    "wait until another thread has finished",
    "how long do I boil an egg?",
    "who won the football match yesterday?",
    "the petals of this flower are four centimetres long",
]

# First sentences of docstrings, labelled by module. A frozen encoder embeds them. lam trains one layer and puts a
# posterior over it. All modules are in the gallery: none is set aside as a stranger.
folder = tempfile.mkdtemp()
settings = [f"--output={folder}/run", "--training.epochs=10", "--evaluation.corrupted=0", "--data.strangers=0"]
run(load_config("docstrings laplace_posthoc", settings), progress=False)

# Calibration learns, from held-out sentences, the probability that the first hit is right.
calibrate_run(f"{folder}/run", CalibrationOptions({"far": 0.1, "ood": 0.05}), progress=False)

answers = search(f"{folder}/run", texts=QUESTIONS, k=1)
decisions = answers.decisions
assert decisions is not None  # the run is calibrated
rows = list(zip(QUESTIONS, decisions.decision, decisions.probability.tolist(), answers.items, strict=True))
for question, decision, probability, (hit,) in rows:
    print(f"{probability:.2f}  {decision:8}  {question}  ->  {hit.label}")

# The picture: how sure each answer is, and whether it is given.
colours = {"match": "tab:green", "unknown": "tab:orange", "abstain": "tab:grey"}
figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
axes.barh(range(len(rows)), [row[2] for row in rows], color=[colours[row[1]] for row in rows])
for place, (_, decision, probability, (hit,)) in enumerate(rows):
    axes.text(probability + 0.01, place, f"{hit.label}?  {decision}", va="center", fontsize=9)
axes.set_yticks(range(len(rows)), QUESTIONS)
axes.invert_yaxis()
axes.set(xlim=(0, 1.3), xlabel="probability that the first hit is right", title="Which module does it?")
axes.legend([plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()], colours, loc="lower right")
figure.savefig("questions.png", dpi=110)

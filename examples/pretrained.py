"""A pretrained network made Bayesian: the score of its posterior detects views of another photograph.

    python examples/pretrained.py

Needs the extras `cpu` and `images`; writes pretrained.png.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader

import lam
from lam.datasets.spots import portrait
from lam.methods import Deterministic, Training

# 960 views of 64 spots in two photographs that ship with scikit-learn. The network must say which spot it sees.
spots = lam.datasets.load("spots")
strangers = portrait(like=spots.train)  # lam.datasets.spots.portrait: crops of another photograph

# A network with ImageNet's weights, frozen. Only its last layer learns, on the training views.
network = lam.models.build("efficientnet_lite0", dimension=32)
training = Training(loss=lam.losses.SupCon(temperature=0.1), epochs=10, batch_size=256, progress=False)
Deterministic().train(network, spots.train, training)

# The posterior over that layer. Nothing is trained here, and nothing changes in what the network finds. Held-out views
# choose its width.
batches = DataLoader(spots.train, batch_size=256, shuffle=True, generator=torch.Generator().manual_seed(0))
encoder = lam.fit(network, batches, margin=0.7, progress=False)
encoder.tune(DataLoader(spots.validation, batch_size=64))

# Every embedding now has a concentration: a small kappa means that the network is unsure.
known = encoder.embed(DataLoader(spots.test, batch_size=64))
strange = encoder.embed(DataLoader(strangers, batch_size=64))

labels = torch.cat([torch.zeros(len(known)), torch.ones(len(strange))])
scores = {
    "κ": -torch.cat([known.kappa, strange.kappa]),
    "variance": torch.cat([known.variance, strange.variance]),
}
for name, score in scores.items():
    print(f"AUROC of strangers by {name}: {roc_auc_score(labels, score):.2f}")

# The picture: kappa of both, and the views that the network is least and most sure of.
figure = plt.figure(figsize=(9, 4), layout="constrained")
left, right = figure.subfigures(1, 2)
axes = left.subplots()
for name, kappa in (("known spots", known.kappa), ("strangers", strange.kappa)):
    axes.hist(kappa.log10(), bins=30, density=True, alpha=0.6, label=name)
axes.set(xlabel="log10 κ", yticks=[], title="How sure the network is")
axes.legend()

views = [(spots.test.images[number], known.kappa[number]) for number in range(len(known))]
views += [(strangers.images[number], strange.kappa[number]) for number in range(len(strange))]
views.sort(key=lambda view: view[1])
for panel, (image, kappa) in zip(right.subplots(2, 4).flat, views[:4] + views[-4:], strict=True):
    panel.imshow(image.permute(1, 2, 0))
    panel.set_title(f"κ = {kappa:.0f}", fontsize=9)
    panel.axis("off")
right.suptitle("Least sure (above), most sure (below)")
figure.savefig("pretrained.png", dpi=110)

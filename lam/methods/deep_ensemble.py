"""Deep ensemble: several networks, trained from different seeds; where they disagree, the input is uncertain.

Source: Lakshminarayanan, Pritzel and Blundell (2017); Warburg et al. (2023), appendix G.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from lam import models
from lam.encoders.ensemble import Combine, EnsembleEncoder, align, features_and_units
from lam.methods.base import Method, Trained, head_of, reference_inputs
from lam.models.weights import check_is_file, load_weights, unwrapped
from lam.training import Training, device_of
from lam.utils.checks import check_at_least, check_choice


@dataclass(frozen=True)
class DeepEnsemble(Method):
    """Train M networks as `Deterministic` does, each from its own seed, and combine them.

    Attributes:
        n_members: M ≥ 2 networks.
        checkpoints: M files of weights (.safetensors or .pth) to load instead of training; empty to train.
        combine: `concatenate`, or `mean` as in Warburg et al.; see `EnsembleEncoder`.
        reference: number of random training items, at least 2, that align the members before κ is computed.
    """

    n_members: int = 5
    checkpoints: Sequence[str] = ()
    combine: Combine = "concatenate"
    reference: int = 5000

    name = "deep_ensemble"
    encoder = EnsembleEncoder

    def __post_init__(self) -> None:
        for name in ("n_members", "reference"):
            check_at_least(name, getattr(self, name), 2)
        check_choice("combine", self.combine, get_args(Combine))
        if self.checkpoints and len(self.checkpoints) != self.n_members:
            raise ValueError(
                f"checkpoints must be empty, or one file for each of n_members={self.n_members} members, got "
                f"{len(self.checkpoints)}"
            )

    @property
    def n_seeds(self) -> int:
        """One seed for each member."""
        return self.n_members

    def check_start(self, *, pretrained: bool) -> None:
        """Reject a single trained network, and missing checkpoints."""
        if pretrained:
            raise ValueError(
                f"a deep ensemble cannot start from one trained network: give {self.n_members} files as checkpoints "
                "(--method.checkpoints=[...] in a run), or start without a trained network"
            )
        for file in self.checkpoints:
            check_is_file(file)

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train the members; see `Method.train`. Stages are `member-1` and so on and, with `concatenate`, `align`.

        The network is the first member. `training.another` makes the other members from the following seeds; by
        default, `network.recipe` makes them, without pretrained weights. Histories and sub-folders of checkpoints are
        named `member-1` and so on.
        """
        self.check_start(pretrained=training.pretrained)
        network = unwrapped(network)
        members = [network, *map(unwrapped, self._others(network, training))]
        if len(set(members)) < len(members):
            raise ValueError(
                "Training(another=...) must return a new network for each seed, got one of them twice, which cannot "
                "be several members: build the network inside the function"
            )
        head = _common_head(members, dataset)
        histories = {}
        for number, member in enumerate(members, start=1):
            if self.checkpoints:
                load_weights(member, self.checkpoints[number - 1])
                member.to(device_of(training.accelerator)).eval()
                continue
            part = f"member-{number}"
            own = replace(
                training,
                seed=training.seed + number - 1,
                folder=training.part(part),
                stage=lambda _, part=part: training.stage(part),
            )
            for history in self.train_network(member, dataset, own).values():
                histories[part] = history
        rotations = None
        if self.combine == "concatenate":
            with training.stage("align"):
                inputs = reference_inputs(dataset, self.reference, seed=training.seed)
                rotations = align(torch.cat([features_and_units(members, head, batch)[1] for batch in inputs], 1))
        own = {"combine": self.combine, "rotations": rotations}
        return Trained(self.encoder_of(members, head, dataset, training, **own), histories)

    def _others(self, network: nn.Module, training: Training) -> list[nn.Module]:
        recipe: Any = getattr(network, "recipe", None)
        another = training.another or (lambda seed: models.build(**{**recipe, "seed": seed}))
        if training.another is None and not recipe:
            raise ValueError(
                "lam.models did not build this network and cannot make more like it: give Training(another=...), a "
                "function from a seed to a network with new random weights"
            )
        dtype = next(network.parameters()).dtype
        return [another(training.seed + number).to(dtype) for number in range(1, self.n_members)]


def _common_head(members: Sequence[nn.Module], dataset: Any) -> str:
    head, first = "", ""
    for number, member in enumerate(members, start=1):
        head = head_of(member, dataset)
        layer: Any = member.get_submodule(head)
        shape = f"{head} ({layer.in_features} -> {layer.out_features})"
        first = first or shape
        if shape != first:
            raise ValueError(f"members must have heads of one shape: member 1 has {first}, member {number} has {shape}")
    return head

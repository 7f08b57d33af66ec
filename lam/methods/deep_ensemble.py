"""Deep ensemble: several networks, trained alike from different seeds; where they disagree, the input is uncertain.

Source: Lakshminarayanan, Pritzel and Blundell (2017); Warburg et al. (2023), appendix G.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from lam import models
from lam.encoders.ensemble import Combine, EnsembleEncoder, align, features_and_units
from lam.losses import Loss
from lam.methods.base import Stage, Trained, head_of, silent, train_network
from lam.methods.reference import reference_inputs
from lam.models.weights import load_weights
from lam.pairs.relation import Relation
from lam.utils.checks import refuse_below, refuse_other_than


@dataclass(frozen=True)
class EnsembleOptions:
    """How the ensemble is made.

    Attributes:
        n_members: M ≥ 2 networks.
        checkpoints: files of their weights, M of them (.safetensors or .pth), in place of training; none for training.
        combine: `concatenate`, or the paper's `mean`; see `EnsembleEncoder`.
        reference: how many training items, drawn at random, the members are aligned on.

    Raises:
        ValueError: for an option outside its range, or another number of checkpoints than of members.
    """

    n_members: int = 5
    checkpoints: Sequence[str] = ()
    combine: Combine = "concatenate"
    reference: int = 5000

    def __post_init__(self) -> None:
        for name in ("n_members", "reference"):
            refuse_below(name, getattr(self, name), 2)
        refuse_other_than("combine", self.combine, get_args(Combine))
        if self.checkpoints and len(self.checkpoints) != self.n_members:
            raise ValueError(
                f"checkpoints must be none, or one file for each of the n_members = {self.n_members} members, "
                f"got {len(self.checkpoints)}"
            )


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    options: EnsembleOptions | None = None,
    pretrained: bool = False,
    relation: Relation | None = None,
    seed: int = 0,
    stage: Stage = silent,
    others: Sequence[nn.Module] | None = None,
    folder: str | Path | None = None,
    **training: Any,
) -> Trained:
    """Train M networks, each as `lam.methods.deterministic.train` would from its own seed, and align them.

    Args:
        network: the first member: maps (N, ...) inputs to unit rows (N, D) by a linear layer and normalisation.
        dataset: of (input, label); see `lam.training.train`.
        loss: of `lam.losses`.
        epochs: passes over the data, of every member.
        options: how the ensemble is made.
        pretrained: refused, unless `options.checkpoints` names the weights of every member.
        relation: what makes two items a pair; by default their labels.
        seed: of the first member: of the order of its data and of everything drawn. The others have the seeds after it.
        stage: see `lam.methods.base.Stage`; stages are `member-1` and so on, and `align`.
        others: the M − 1 other members, of the same shape. By default `lam.models.build` makes them by the recipe of
            the network, each with its own seed; a recipe holds no pretrained weights, so a network that began with
            some needs others that do.
        folder: where checkpoints are kept, in `member-1` and so on; None for none.
        training: further options of `lam.training.train`.

    Returns:
        The encoder, and the history of each member that was trained, by `member-1` and so on.

    Raises:
        ValueError: as `lam.training.train` and `lam.models.weights.load_weights`; for a network that is trained
            already, or that has no recipe where others are not given; or for others of another number or head.
    """
    options = options or EnsembleOptions()
    if pretrained and not options.checkpoints:
        raise ValueError(
            f"a deep ensemble has {options.n_members} trained networks, and this is one: leave pretrained out to train "
            "them, or name a file of weights for each in the option checkpoints"
        )
    members = [network, *_others(network, options.n_members, seed, others)]
    head = _common_head(members, dataset)
    histories = {}
    for number, member in enumerate(members, start=1):
        if options.checkpoints:
            load_weights(member, options.checkpoints[number - 1])
        found = train_network(
            member,
            dataset,
            method=EnsembleEncoder.kind,
            pretrained=bool(options.checkpoints),
            relation=relation,
            stage=lambda _, number=number: stage(f"member-{number}"),
            loss=loss,
            epochs=epochs,
            seed=seed + number - 1,
            folder=None if folder is None else Path(folder) / f"member-{number}",
            **training,
        )
        histories |= {f"member-{number}": history for history in found.values()}
    rotations = None
    if options.combine == "concatenate":
        with stage("align"):
            inputs = reference_inputs(dataset, options.reference, seed=seed)
            rotations = align(torch.cat([features_and_units(members, head, batch)[1] for batch in inputs], 1))
    common = {"relation": relation, "preprocessing": getattr(dataset, "preprocessing", None)}
    return Trained(EnsembleEncoder(members, head, rotations=rotations, combine=options.combine, **common), histories)


def _others(network: nn.Module, n_members: int, seed: int, others: Sequence[nn.Module] | None) -> Sequence[nn.Module]:
    if others is not None:
        if len(others) != n_members - 1:
            raise ValueError(f"others must be n_members - 1 = {n_members - 1} networks, got {len(others)}")
        return others
    recipe: Any = getattr(network, "recipe", None)
    if not recipe:
        raise ValueError(
            "lam.models did not build this network, so it cannot make more of its kind: give the other members, each "
            f"with random weights of its own: others=[...] of n_members - 1 = {n_members - 1} networks"
        )
    return [models.build(**{**recipe, "seed": seed + number}) for number in range(1, n_members)]


def _common_head(members: Sequence[nn.Module], dataset: Any) -> str:
    heads = [head_of(member, dataset) for member in members]
    layers: list[Any] = [member.get_submodule(head) for member, head in zip(members, heads, strict=True)]
    described = [
        f"{head} ({layer.in_features} -> {layer.out_features})" for head, layer in zip(heads, layers, strict=True)
    ]
    for number, found in enumerate(described, start=1):
        if found != described[0]:
            raise ValueError(
                f"members must have one shape: the head of member {number} is {found}, of 1 {described[0]}"
            )
    return heads[0]

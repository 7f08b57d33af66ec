"""Adapters whose library is not installed."""

import importlib
import sys

import pytest

ADAPTERS = {
    "hub": ("huggingface_hub", "hub"),
    "langchain": ("langchain_core.documents", "langchain"),
    "llama_index": ("llama_index.core.schema", "llama-index"),
    "onnx": ("onnxscript", "onnx"),
    "qdrant": ("qdrant_client", "qdrant"),
    "sentence_transformers": ("sentence_transformers", "text"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_without_its_library_an_adapter_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, extra = ADAPTERS[name]
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"lam.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"lam-retrieval\[{extra}\]"):
        importlib.import_module(f"lam.integrations.{name}")

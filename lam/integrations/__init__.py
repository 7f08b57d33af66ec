"""Adapters for other libraries, one module for each; an import error names the missing extra.

Import an adapter by its module name, such as `lam.integrations.langchain`.
"""

__all__ = ["langchain", "llama_index", "sentence_transformers"]

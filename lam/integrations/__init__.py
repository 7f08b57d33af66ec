"""Adapters that put lam into other libraries: one module a library, each with an extra of its name.

An adapter is imported by its module name, such as `lam.integrations.langchain`; importing this package imports none.
"""

__all__ = ["langchain", "llama_index", "sentence_transformers"]

"""Adapters that put lam into other libraries, one module a library; an import error names the extra that is missing.

Import an adapter by its module name, such as `lam.integrations.langchain`; importing this package imports none.
"""

__all__ = ["langchain", "llama_index", "sentence_transformers"]

"""Searchable collections of embeddings: exact, by FAISS or by Milvus."""

__all__ = ["fusion", "hits", "milvus_index"]

"""Collections of embeddings, searched: exactly, by FAISS or by Milvus."""

__all__ = ["fusion", "hits", "milvus_index"]

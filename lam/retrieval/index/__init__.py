"""Collections of embeddings, searched: exactly, by FAISS or by Milvus."""

"""The items of a run: made of images and texts, stored in SQLite, and indexed by FAISS or Milvus.

item, fusing, operations   an item, its limits and its content hash; fusing images; operations that change items
filters, groups     conditions on items; hits by label
embed, shards       embedding images and texts; files of embeddings
image_list, enrolment   lists of images; items from embedded images
store, transaction, database   the items in SQLite, their transactions, and SQLite's errors
snapshot, replica   items that another process writes: as they were at one moment, or as they are now
local_index, remote_index, gallery   the index in this process or in Milvus; the store with its index
decide              decisions from hits
damaged, refusal    damaged image files; refused operations
"""

__all__ = ["decide", "embed", "enrolment", "image_list", "shards"]

"""The items of a run: made of images and texts, stored in SQLite, and indexed by FAISS or Milvus.

item, operations    an item, its limits and its content hash; operations that change items
filters             conditions on items
embed, shards       embedding images and texts; files of embeddings
image_list, enrolment   lists of images; items from embedded images
store, database     the items in SQLite, their transactions, and SQLite's errors
replica             items that another process writes: as they were at one moment, or as they are now
local_index, remote_index, gallery   the index in this process or in Milvus; the store with its index
decide              decisions from hits
refusal             refused operations
"""

__all__ = ["decide", "embed", "enrolment", "image_list", "shards"]

"""The items of a run: images and texts become items, SQLite stores them, and an index of FAISS or Milvus follows.

item, fusing, operations   an item, its limits and its content hash; what changes items
filters, groups     conditions on items; hits by label
embed, shards       embedding of files; embeddings as files
image_list, enrolment   lists of images; items from embedded images
store, transaction, database   the durable items, changes of them, SQLite
snapshot, replica   the items at one moment, or at every moment, read beside a writer
local_index, remote_index, gallery   the index in this process or in Milvus, and the store with its index
decide              from hits to a decision
damaged, refusal    damaged image files; refused operations
"""

__all__ = ["decide", "embed", "enrolment", "image_list", "shards"]

"""The items of a run: images and texts become items, SQLite keeps them, an index of FAISS or Milvus follows.

item, fusing        an item, its limits and its content hash; one more image fused into it
embed, shards       files embedded; embeddings of folders as files
image_list, enrolment   lists of images; embedded images as items
store, snapshot     the durable items; the items of one moment, read beside a writer
local_index, remote_index, gallery   the index of this process or of Milvus, and the store with its index
decide              from hits to a decision
damaged, refusal    files that cannot be read; refused operations
"""

__all__ = ["decide", "embed", "enrolment", "image_list", "shards"]

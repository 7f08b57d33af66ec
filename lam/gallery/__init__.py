"""The items that a run searches among: how images become items, and the one durable store that they live in.

item.py         one item, what its parts may be, its content hash
image_list.py   lists of images as tables
shards.py       embeddings of a folder as files
embed.py        images of folders and lists, embedded
enrolment.py    embedded images as items: ids, the gate for uncertain ones, fusion
fusing.py       one more image fused into an item
store.py        the items on disk: SQLite, durable before anything is acknowledged
local_index.py  the FAISS index that follows the store
remote_index.py a Milvus collection that follows it, behind a circuit breaker
gallery.py      store and index, one for the other: written together, searched while that happens
snapshot.py     the items of one moment, read beside whoever writes
refusal.py      what is refused, by kind
"""

"""Checkpoint folders in object storage, named by a URL such as `s3://bucket/run` (docs/checkpoints.md).

`store.py` reads and writes objects through fsspec and tries again; `mirror.py` keeps a local copy of what is on its way
and decides when a tag is complete. Imported when a URL is used.
"""

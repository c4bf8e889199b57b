"""Checkpoint folders in object storage, named by a URL such as `s3://bucket/run` (docs/checkpoints.md).

`store.py` reads and writes objects through fsspec with retries; `mirror.py` keeps local copies during transfers and
decides when a tag is complete. Imported when a URL is used.
"""

"""Checkpoints: writing them safely, and loading any of them into any layout (docs/checkpoints.md).

A file says which interval of which parameter it holds; loading intersects intervals. `files/` writes and verifies,
`foreign/` reads the layouts of release 0.19 and of others, `storage/` has the documented pluggable engines. Start
reading: `shards.py`, `contents.py` (what each file holds), `save.py`, `load.py`.
"""

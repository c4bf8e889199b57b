"""Sequence parallelism: attention of sequences that are sharded over ranks."""

"""Sequence parallelism: attention over sequences sharded across ranks."""

"""Keeping a region's inputs instead of what it computed: ``checkpointing`` is the interface."""

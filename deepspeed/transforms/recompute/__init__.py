"""Keeping a region's inputs instead of its activations: ``checkpointing`` is the interface."""

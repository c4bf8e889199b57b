"""Activation recomputation: ``checkpointing`` is the interface."""

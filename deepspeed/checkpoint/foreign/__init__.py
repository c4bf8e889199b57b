"""Checkpoints of others: release 0.19, universal ones, and plain weights."""

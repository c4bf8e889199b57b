"""Checkpoint files: crash-safe writes, verified reads."""

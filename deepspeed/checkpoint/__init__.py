"""Checkpoints: writing them safely, and loading any of them into any layout (see docs/checkpoints.md)."""

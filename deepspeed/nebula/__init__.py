"""Checkpoints through Azure Nebula."""

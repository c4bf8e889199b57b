"""Inference: so far its configuration; engines are refused by name."""

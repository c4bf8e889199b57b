"""Quantization, pruning and layer reduction."""

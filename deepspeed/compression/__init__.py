"""Quantization-aware training, pruning, layer reduction and MoQ (docs/compression.md).

Knows parallel layers, of which each rank compresses its part. Start reading: `compress.py`, `techniques.py`.
"""

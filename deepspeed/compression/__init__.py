"""Quantization-aware training, pruning, layer reduction and MoQ (docs/compression.md).

In tensor-parallel layers each rank compresses its own part. Start reading: `compress.py`, `techniques.py`.
"""

"""Data: loaders, samplers, curricula, data analysis, token routing, packing.

Uses `base` to `optim`. Start reading: `loader.py`.
"""

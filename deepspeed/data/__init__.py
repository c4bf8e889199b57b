"""Data: loaders, samplers, curricula, data analysis, token routing, packing.

Imports only rooms from `base` to `optim`. Start reading: `loader.py`.
"""

"""Documented place of the 1-bit optimizers; mixed precision itself is in ``runtime/precision.py``."""

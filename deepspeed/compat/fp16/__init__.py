"""Documented path of the 1-bit optimizers; mixed precision itself is in ``zero/precision.py``."""

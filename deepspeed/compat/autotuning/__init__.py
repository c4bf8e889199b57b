"""Documented names of the autotuner."""

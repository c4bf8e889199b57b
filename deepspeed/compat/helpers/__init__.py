"""Documented helper functions that the engine itself does not need."""

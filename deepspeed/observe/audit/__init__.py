"""Compact records of each step's results, and the comparison of two recorded runs."""

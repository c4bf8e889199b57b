"""Observers of a run: progress, curves, timers, the lines at the start."""

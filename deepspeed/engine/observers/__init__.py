"""Observers of a run: progress, curves, timers, the start report."""

"""Observers that report progress: lines, curves, timings, the live page."""

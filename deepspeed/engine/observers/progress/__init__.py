"""Observers that report how a run is doing: lines, curves, timings, the live page."""

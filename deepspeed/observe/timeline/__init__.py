"""Timelines: intervals of every rank's work and waits, and the ranks that others waited for."""

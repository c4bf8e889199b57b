"""Schedules: in which order stages work, as data that is simulated without processes."""

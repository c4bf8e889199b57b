"""Timelines: which rank did what when, and who waited for whom."""

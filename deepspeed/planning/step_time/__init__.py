"""Predicted step time, for machines and networks that need not be available."""

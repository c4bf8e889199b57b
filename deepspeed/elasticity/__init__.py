"""Elastic batch sizes."""

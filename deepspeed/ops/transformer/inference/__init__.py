"""Documented operations of inference layers that can be called directly."""

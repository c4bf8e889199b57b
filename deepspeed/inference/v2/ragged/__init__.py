"""Ragged batching: so far its configuration."""

"""Sections of the config: one pydantic model for each, with its defaults and documentation."""

"""Sections of the config: one pydantic model each, with its defaults and documentation."""

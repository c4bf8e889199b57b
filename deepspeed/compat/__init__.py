"""Documented paths and names of release 0.19 that are nobody's room: the table that leads to our modules
(`aliases.py`), the import hook that follows it (`finder.py`), what to use instead of names that are gone
(`absent.py`), and code that exists for an old path alone. Nothing else imports it.
"""

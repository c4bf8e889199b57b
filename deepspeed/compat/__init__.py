"""Documented paths and names of release 0.19: the table of aliases to our modules (`aliases.py`), the import hook
that resolves them (`finder.py`), replacements for removed names (`absent.py`), and code that exists only for old
paths. Nothing else imports this package.
"""

"""Errors of interfaces that are kept for their name."""


class DeprecatedException(Exception):
    """A documented entry that has been replaced by another one."""

"""Version of the package; `tests/test_import.py` compares it to the one in `pyproject.toml`."""

__version__ = "1.0.0"

# Filled in by a release build; a source checkout leaves them unknown.
git_hash = "unknown"
git_branch = "unknown"

version = __version__

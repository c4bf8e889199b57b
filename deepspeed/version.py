"""Version of the package; `tests/test_import.py` holds it against the one in `pyproject.toml`."""

from __future__ import annotations

__version__ = "1.0.0"

# Filled by a release build that knows them; a source checkout leaves them unknown.
git_hash = "unknown"
git_branch = "unknown"

version = __version__

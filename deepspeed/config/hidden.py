"""Values of a config that nobody else may read: what is logged, or saved with a checkpoint, goes without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_ENDINGS = ("api_key", "access_token", "auth_token", "password", "secret")


def without_secrets(config: Any) -> Any:
    """A copy of nested containers in which such values are replaced."""
    if isinstance(config, Mapping):
        return {
            key: HIDDEN if _is_secret(key, value) else without_secrets(value) for key, value in config.items()
        }
    if isinstance(config, (list, tuple)):
        return type(config)([without_secrets(value) for value in config])
    return config


def _is_secret(key: Any, value: Any) -> bool:
    return isinstance(key, str) and key.lower().endswith(_ENDINGS) and isinstance(value, str) and bool(value)

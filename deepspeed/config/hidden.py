"""Values of a config that nobody else may read: what is logged, or saved with a checkpoint, goes without them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

# A tokenizer's tokens are none.
_SECRET = re.compile(r"(?i)(api_key|access_key|password|secret|^token|(?<!bos|cls|eos|pad|sep|unk)_token)$")
# Before a host. Elsewhere than on the web a name without a password is part of the place (abfss://container@account).
_ACCOUNT = re.compile(r"(?i)(https?://)[^/?#\s]*@|([a-z][\w+.-]*://)[^/?#\s@]*:[^/?#\s]*@")


def without_secrets(config: Any) -> Any:
    """A copy of nested containers in which such values are replaced, and URLs have no user and password."""
    if isinstance(config, str):
        return _ACCOUNT.sub(r"\1\2", config)
    if isinstance(config, Mapping):
        return {
            key: HIDDEN if _is_secret(key, value) else without_secrets(value) for key, value in config.items()
        }
    if isinstance(config, (list, tuple)):
        return type(config)([without_secrets(value) for value in config])
    return config


def _is_secret(key: Any, value: Any) -> bool:
    return isinstance(key, str) and bool(_SECRET.search(key)) and isinstance(value, str) and bool(value)

"""Secrets in a config: removed from logs and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

# Token entries of a tokenizer (bos_token, ...) are no secrets.
_SECRET = re.compile(r"(?i)(api_key|access_key|password|secret|^token|(?<!bos|cls|eos|pad|sep|unk)_token)$")
# User and password before a host. Outside the web, a user without a password is part of the address
# (abfss://container@account).
_ACCOUNT = re.compile(r"(?i)(https?://)[^/?#\s]*@|([a-z][\w+.-]*://)[^/?#\s@]*:[^/?#\s]*@")


def without_secrets(config: Any) -> Any:
    """Copy nested containers with secrets replaced, and without user and password in URLs."""
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

"""The configs of Transformers' models."""

from __future__ import annotations

from typing import Any


def text_config(config: Any) -> Any:
    """The part of a model's config that describes its language model; ``config`` itself where it has no parts."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config

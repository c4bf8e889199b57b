"""Helpers for Transformers models: configs, load errors, attention registries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def text_config(config: Any) -> Any:
    """Return the language-model part of a model's config; ``config`` itself if it has no parts."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def why_not_loaded(name: str, error: OSError) -> str:
    """Explain why ``from_pretrained(name)`` raised ``error``. Transformers takes any name that is no folder, even a
    path, for a hub name, and complains about its form."""
    path = Path(name)
    if path.is_dir():
        return str(error)
    if path.exists():
        return "this is a file: pass its folder"
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return f"no such folder; tried as a model name on the hub: {str(error).splitlines()[0]}"
    return "no such folder"


def attention_registries(purpose: str) -> tuple[Any, Any]:
    """Return Transformers' registries, by name, of attention functions and of their mask functions.

    ImportError: the installed release builds masks in each model, so a custom attention could not get its own.
    """
    import transformers

    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as problem:
        raise ImportError(
            f"{purpose} needs transformers>=4.53, where models look up attention and mask functions by "
            f"name; {transformers.__version__} is installed"
        ) from problem
    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS

"""Exchangeable parts of ragged inference: what each kind computes, by whom, and how one is chosen by its name.

The engine runs unchanged models and needs none of them. They serve those who build a model of such parts, or compare
one of their own with a plain one.
"""

from __future__ import annotations

from deepspeed.inference.v2.modules import implementations, interfaces
from deepspeed.inference.v2.modules.module_registry import ConfigBundle

__all__ = ["ConfigBundle", "implementations", "interfaces"]

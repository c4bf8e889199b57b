"""The device everything runs on, behind one object: ``get_accelerator()``."""

from .abstract_accelerator import DeepSpeedAccelerator
from .select import get_accelerator, is_current_accelerator_supported, set_accelerator

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

"""What torch offers for elastic training."""

from __future__ import annotations


def is_torch_elastic_compatible() -> bool:
    """Whether the installed torch has elastic agents: True, as every release that this package supports does."""
    return True

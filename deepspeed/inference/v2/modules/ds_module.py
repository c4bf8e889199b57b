"""What all parts have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from deepspeed.config.section import DeepSpeedConfigModel, Int

__all__ = ["DSModuleBase", "DSModuleConfig"]


class DSModuleConfig(DeepSpeedConfigModel):
    """``max_tokens``: of one forward."""

    max_tokens: Int


class DSModuleBase(nn.Module, ABC):
    """A part, of a kind that says its ``config_class``; an implementation says its ``name`` and what it supports."""

    def __init__(self, config: DSModuleConfig, implementation_config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._config: Any = config
        self._implementation_config = implementation_config or {}

    @staticmethod
    @abstractmethod
    def name() -> str:
        """By which it is chosen."""

    @staticmethod
    @abstractmethod
    def config_class() -> type[DSModuleConfig]:
        """Of its kind."""

    @staticmethod
    @abstractmethod
    def supports_config(config: Any) -> bool:
        """Whether it can do what ``config`` asks for."""

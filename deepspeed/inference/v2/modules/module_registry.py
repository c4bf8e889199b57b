"""Parts by their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from deepspeed.config.section import DeepSpeedConfigModel
from deepspeed.inference.v2.modules.ds_module import DSModuleBase

__all__ = ["ConfigBundle", "DSModuleRegistryBase"]

Kind = TypeVar("Kind", bound=type)


class ConfigBundle(DeepSpeedConfigModel):
    """Which part is wanted, for what, and what is only for this implementation."""

    name: str
    config: DeepSpeedConfigModel
    implementation_config: dict[str, Any] = {}


class DSModuleRegistryBase(ABC):
    """The implementations of one kind; each subclass has a dict ``registry`` of its own."""

    registry: ClassVar[dict[str, type[DSModuleBase]]]

    @classmethod
    def instantiate_config(cls, config_bundle: ConfigBundle) -> DSModuleBase:
        """The part that is wanted. KeyError: there is none of this name. ValueError: it does not support the config."""
        known = cls.registry
        if config_bundle.name not in known:
            raise KeyError(f"no part is called {config_bundle.name!r}; known are {', '.join(sorted(known))}")
        found = known[config_bundle.name]
        if not found.supports_config(config_bundle.config):
            raise ValueError(f"{config_bundle.name} does not support {config_bundle.config!r}")
        return found(config_bundle.config, config_bundle.implementation_config)  # type: ignore[arg-type]

    @staticmethod
    @abstractmethod
    def associated_class() -> type[DSModuleBase]:
        """The kind."""

    @classmethod
    def register_module(cls, child_class: Kind) -> Kind:
        """A decorator. TypeError: the class is not of this kind."""
        if not issubclass(child_class, cls.associated_class()):
            raise TypeError(
                f"{child_class.__name__} is registered as {cls.associated_class().__name__}, which it does not inherit "
                "from"
            )
        cls.registry[child_class.name()] = child_class
        return child_class

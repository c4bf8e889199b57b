"""Names of modules and buckets for a report about a hang, which finds these in the frames of a rank."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


class NamesOfEngine:
    """Read by another thread, while a rank stands still; does not keep the engine alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def of_module(self, module: nn.Module) -> str | None:
        """None: it is no part of this engine's. The whole module has the name of its class."""
        engine = self._engine()
        if engine is None:
            return None
        if module is engine.module:
            return type(module).__name__
        return next((name for name, each in engine.module.named_modules() if each is module), None)

    def of_parameters(self, holder: Any) -> list[str]:
        """Return the parameters of ``holder``: a bucket of weights or gradients, or whatever has a layout."""
        engine = self._engine()
        if engine is None:
            return []
        params = getattr(holder, "params", None)
        if params is None and engine.core is not None:
            params = engine.core.store.params
        if params is None:
            return []
        held = [params[slot.param] for slot in holder.layout.slots if 0 <= slot.param < len(params)]
        return [name for param in held if (name := engine.param_names.get(param))]

    def position(self) -> str:
        engine = self._engine()
        if engine is None:
            return ""
        facts = (f"step {engine.global_steps}", engine.position_in_batch(), engine._network.phase)
        return ", ".join(filter(None, facts))

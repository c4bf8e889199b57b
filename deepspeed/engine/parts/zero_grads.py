"""The part of an engine that clears gradients for scripts: ``engine.zero_grads``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.engine.stand_in import MethodStandIn

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


class ZeroGrads:
    """Clears gradients outside of an update. Between the micro-batches of one every ``zero_grad`` does nothing: there
    it is a leftover of a loop that updated after each of them, and ``abandon_update`` drops them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stand_ins: list[MethodStandIn] = []

    def answer_for_module(self) -> None:
        """Answer ``module.zero_grad()`` from now on."""
        self._stand_ins.append(MethodStandIn(self._engine.module, "zero_grad", self._zero_module))

    def answer_for_optimizer(self) -> None:
        """Answer ``zero_grad()`` of the optimizer that ``engine.optimizer`` is or wraps from now on."""
        self._stand_ins.append(MethodStandIn(self._engine.basic_optimizer, "zero_grad", self._zero_optimizer))

    def remove(self) -> None:
        """Give module and optimizer their own methods back."""
        for stand_in in self._stand_ins:
            stand_in.remove()

    def zero_grad(self) -> None:
        """Drop every gradient, including those already reduced; do nothing between the micro-batches of an update."""
        engine = self._engine
        engine._recover()
        if engine.clock.mid_update:
            return
        if engine.core is not None:
            engine.core.reducer.clear()
        for param in engine.module.parameters():
            param.grad = None

    def _zero_module(self, *args: Any, **kwargs: Any) -> None:
        """Also drop what is kept elsewhere than in ``param.grad``: from stage 1 on, all of it."""
        engine = self._engine
        engine._recover()
        if not engine.clock.mid_update:
            type(engine.module).zero_grad(engine.module, *args, **kwargs)
            engine.zero_grad()

    def _zero_optimizer(self, *args: Any, **kwargs: Any) -> None:
        """Let the optimizer clear: what it does to ``param.grad`` at stage 0 counts as if assigned
        (``GradReducer``)."""
        engine, optimizer = self._engine, self._engine.basic_optimizer
        engine._recover()
        if engine.clock.mid_update:
            return
        type(optimizer).zero_grad(optimizer, *args, **kwargs)  # type: ignore[arg-type]
        if engine.core is not None and not engine.core.reducer.expose:
            engine.core.reducer.clear()

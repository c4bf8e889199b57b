"""Compilation of an engine's module (docs/compile.md): ``engine.compilation``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed.base.logging import logger

if TYPE_CHECKING:
    from deepspeed.config.sections.model import CompileConfig
    from deepspeed.engine.interface import Engine
    from deepspeed.transforms.compile.backend import GraphPassRunner
    from deepspeed.transforms.compile.passes.contract import PassContract


class Compilation:
    """``compile`` and its state."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_compiled = False
        self.work: GraphPassRunner | None = None
        """The graphs of ``compile.deepcompile``, once it has begun."""

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] = {},  # noqa: B006 - the documented default, never written to
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Apply ``torch.compile`` to the wrapped module in place; at stage 3 block by block.

        Args:
            backend: default: the accelerator's.
            compile_kwargs: more arguments of ``torch.compile``.
            schedule: with ``compile.deepcompile``, which passes are active from which step on:
                ``[(step, [pass, ...]), ...]``, each pass a name or a function; default: by the ZeRO stage.

        Raises:
            ValueError: the schedule is not one, or names a pass that is unknown or does not fit the stage.
        """
        if self.is_compiled:
            return
        if compiled_autograd_enabled:
            raise NotImplementedError(
                "engine.compile(compiled_autograd_enabled=True) is not available: remove it. Each backward "
                "is compiled with its forward; gradients are reduced by hooks outside the graphs."
            )
        options = dict(compile_kwargs)
        given = options.pop("backend", None)
        if given is not None and backend is not None:
            logger.warning("engine.compile(): using backend=, not the backend in compile_kwargs")
        options["backend"] = backend or given or self._engine.accelerator.get_compile_backend()
        if self.is_deepcompile_enabled():
            config = self._engine._config.compile_config
            options["backend"] = self.follow_passes(options["backend"], config, options, schedule)
            for of_inductor in ("mode", "options"):  # consumed by the backend
                options.pop(of_inductor, None)
        elif schedule is not None:
            logger.warning("engine.compile(schedule=) has no effect without compile.deepcompile: true")
        sharded = self._engine.sharded
        if sharded is not None:
            sharded.offload.compile_units(**options)
        else:
            self._engine.module.compile(**options)
        self.is_compiled = True

    def follow_passes(
        self, backend: str, config: CompileConfig, compile_kwargs: Mapping[str, Any], schedule: Any = None
    ) -> Any:
        """Start following a schedule of passes; return a backend for ``torch.compile`` that runs them."""
        from deepspeed.engine.observers.compile_passes import PassSchedule
        from deepspeed.transforms.compile.backend import GraphPassRunner, make_backend
        from deepspeed.transforms.compile.schedule import default_schedule, read_schedule

        stage = self._engine._config.zero_optimization_stage
        periods = read_schedule(default_schedule(config, stage) if schedule is None else schedule, stage)
        work = GraphPassRunner(debug_log=config.debug_log)
        made = make_backend(backend, config, compile_kwargs, work)
        PassSchedule(self._engine, periods, work)
        self.work = work
        return made

    def register_compile_pass(
        self, pass_name: str, pass_fn: Callable[..., Any], contract: PassContract | None = None
    ) -> None:
        """Register a pass for the schedules of ``compile``
        (``deepspeed.transforms.compile.backend.register_compile_pass``)."""
        from deepspeed.transforms.compile.backend import register_compile_pass

        register_compile_pass(pass_name, pass_fn, contract)

    def get_compile_time(self) -> list[tuple[str, int, int, float]]:
        """Return ``("fwd" or "bwd", index, graph_id, seconds)`` per graph compiled with ``compile.deepcompile``."""
        return list(self.work.times) if self.work is not None else []

    def is_deepcompile_enabled(self) -> bool:
        """Return whether the config enables ``compile.deepcompile``."""
        return self._engine._config.compile_config.deepcompile

    def is_deepcompile_active(self) -> bool:
        """Return whether the module was compiled with ``compile.deepcompile``."""
        return self.work is not None

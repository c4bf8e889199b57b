"""Warnings, given once, about scripts that bypass the engine: steps of the optimizer, methods of release 0.19."""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

import torch

from deepspeed.base.logging import log_dist, warning_once
from deepspeed.zero.accumulation import AccumulationClock

# Steps that bypass the engine or have nothing to apply.


_WATCH = "_ds_step_watch"  # attribute of an optimizer: the hook of the newest engine


class StepWarnings:
    """Warns once when a script calls ``step`` of the optimizer, and once when an update has no gradient.

    The hook on ``optimizer`` holds only weak references. Optimizers without torch's hooks are not watched.
    """

    def __init__(self, optimizer: Any, clock: AccumulationClock) -> None:
        self._said: set[str] = set()
        self._optimizer = optimizer
        self.remove()
        if not hasattr(optimizer, "register_step_pre_hook"):
            return
        at = weakref.ref(clock)

        def look(called: Any, args: Any, kwargs: Any) -> None:
            clock = at()
            if clock is not None and not clock.stepping and called is optimizer:  # trial steps run on copies
                self.before_direct_step()

        vars(optimizer)[_WATCH] = optimizer.register_step_pre_hook(look)

    def before_direct_step(self) -> None:
        self._say(
            "step() of the optimizer was called instead of engine.step(). Accumulation, schedule, "
            "global_steps and the loss scale are bypassed, and nothing is updated if the engine holds the "
            "gradients or master weights. Call engine.step() after every micro-batch."
        )

    def no_gradient(self) -> None:
        self._say(
            "engine.step() without a gradient: no backward reached the model's parameters since the last update. No "
            "weight changes, but the step is counted and the schedule advances. Call engine.backward(loss) before it."
        )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log_dist(text, ranks=[0], level=logging.WARNING)

    def remove(self) -> None:
        """Remove the hook on the optimizer, of any engine."""
        handle = vars(self._optimizer).pop(_WATCH, None)
        if handle is not None:
            handle.remove()


class StepPerBatchWarning:
    """Warns once when a script steps once per accumulated batch, as with DistributedDataParallel: after as many pairs
    of forward and backward as there are accumulation steps. Several losses of one forward, ``no_sync``, pipelines and
    forced boundaries (Accelerate) are not taken for that."""

    def __init__(self, engine: Any) -> None:
        self._at = weakref.ref(engine)
        self._forwards, self._pairs = 0, 0
        self._watched = (
            ("before_forward", self._forward),
            ("after_backward", self._backward),
            ("before_step", self._step),
        )
        for event, subscriber in self._watched:
            engine.events.on(event, subscriber)

    def _forward(self, **_: Any) -> None:
        self._forwards += torch.is_grad_enabled()

    def _backward(self, **_: Any) -> None:
        engine: Any = self._at()
        paired = self._forwards == 1 and not engine.accumulation.inside_no_sync
        self._forwards, self._pairs = 0, self._pairs + 1 if paired else -engine.clock.steps

    def _step(self) -> None:
        engine: Any = self._at()
        pairs, self._forwards, self._pairs = self._pairs, 0, 0
        if engine.pipeline_parallelism or engine.clock.forced or not 1 < pairs == engine.clock.steps:
            return
        text = (
            f"engine.step() was called once for {pairs} micro-batches, an update takes {pairs * pairs}: call it after "
            "every engine.backward(), with the loss undivided; it updates once per accumulated batch"
        )
        log_dist(text, ranks=[0], level=logging.WARNING)
        for event, subscriber in self._watched:
            engine.events.off(event, subscriber)


# Names of release 0.19's engine that trainers replace or override, but that are never called here.


_EXPERTS = "experts are saved and loaded with all weights; mark yours with allreduce=False and group_name"
_MADE = (
    "pass the finished module, optimizer and scheduler to deepspeed.initialize, or functions that create them"
)
_FILES = "wrap engine.save_checkpoint and engine.load_checkpoint"
_EVENTS = "subscribe to engine.events (docs/architecture.md), or set steps_per_print"

ENGINE: dict[str, str] = {
    "_checkpoint_tag_validation": "set checkpoint.tag_validation in the config",
    "_configure_basic_optimizer": _MADE,
    "_configure_bf16_optimizer": _MADE,
    "_configure_distributed_model": _MADE,
    "_configure_fp16_optimizer": _MADE,
    "_configure_lr_scheduler": _MADE,
    "_configure_zero_optimizer": _MADE,
    "_copy_recovery_script": "the scripts are written with the final folder name; copy them after save_checkpoint",
    "_create_zero_checkpoint_files": _FILES,
    "_get_all_zero_checkpoints": _FILES,
    "_get_expert_ckpt_name": _EXPERTS,
    "_load_checkpoint": _FILES,
    "_load_zero_checkpoint": _FILES,
    "_report_progress": _EVENTS,
    "_restore_from_bit16_weights": _FILES,
    "_save_checkpoint": _FILES,
    "_save_moe_checkpoint": _EXPERTS,
    "_save_zero_checkpoint": _FILES,
    "buffered_allreduce_fallback": "set communication_data_type or prescale_gradients in the config",
    "clip_fp32_gradients": "the step itself applies gradient_clipping to the sharded gradients",
    "load_moe_state_dict": _EXPERTS,
    "print_forward_breakdown": _EVENTS,
}
"""Method of the engine -> its replacement."""

MODULES: dict[str, dict[str, str]] = {
    "deepspeed.engine.engine": {
        "MoE": "layers are recognised by deepspeed.parallel.expert.layer.MoE: derive yours from it"
    },
    "deepspeed.transforms.recompute.checkpointing": {
        "_set_cuda_rng_state": "register an accelerator with deepspeed.base.accelerator.set_accelerator()"
    },
}
"""Module -> name in it -> its replacement."""


def warn_of_misuse(engine: Any) -> None:
    """Warn once per name that a trainer replaced, or overrode in a subclass, without effect; and, later, of steps that
    do not follow each backward."""
    if engine.clock.managed and engine.clock.steps > 1 and engine.core is not None:
        StepPerBatchWarning(engine)
    for name, instead in ENGINE.items():
        found = getattr(type(engine), name, None)
        if found is not None and not getattr(found, "__module__", "").startswith("deepspeed."):
            _notify(f"{type(engine).__name__}.{name}", instead)
    for path, names in MODULES.items():
        own = vars(sys.modules.get(path, sys))
        for name, instead in names.items():
            if not getattr(own.get(name), "__module__", "deepspeed.").startswith("deepspeed."):
                _notify(f"{path}.{name}", instead)


def _notify(name: str, instead: str) -> None:
    warning_once(f"{name} was replaced, which has no effect: nothing here calls it; {instead}")

"""Optimizer that the engine returns when it shards state or keeps master weights: a facade for clients.

``StepExecutor`` does the work, on the tensors of ``StateStore``; this module has the members that schedulers,
Accelerate, Lightning and scripts read.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.zero.accumulation import AccumulationClock
from deepspeed.zero.bucket import ParamBucket
from deepspeed.zero.offload.state_moves import HasMovableStates, StateMover
from deepspeed.zero.states.access import JOINED, StateAccess
from deepspeed.zero.step import StepExecutor, StepResult, clip_coefficient

if TYPE_CHECKING:
    from deepspeed.zero.parameter_offload import DeepSpeedZeRoOffload


# Marker classes that clients test optimizers against.


class DeepSpeedOptimizer:
    """Base of every optimizer that the engine wraps around a client's."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """Base of optimizers whose state is sharded or kept in a higher precision."""


class ZeroOptimizer(HasMovableStates, ZeROOptimizer):
    """Wraps ``optimizer`` (the client's, or the one named in the config)."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, executor: StepExecutor, access: StateAccess, mover: StateMover
    ) -> None:
        self.optimizer = optimizer
        self.executor = executor
        self.access = access
        self.mover = mover
        self.last: StepResult | None = None
        self.allgather_bucket_size = 0
        """The config's value in elements; set by the engine."""
        self.external_loss_scale: float | None = None
        """The argument of ``override_loss_scale``."""
        self.differentiate: Callable[[], Callable[..., Any] | None] = lambda: None
        """Returns the ``backward`` of the engine, or None; set by the engine."""
        self.before_direct_step: Callable[[], None] = lambda: None
        """Called before a ``step`` that a script calls here; set by the engine, which steps without it."""
        self.clock: AccumulationClock | None = None
        """The engine's accumulation clock; set by the engine."""

    # What optimizers have -----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return ``train`` or ``eval`` of an optimizer that has them: schedule-free ones swap the weights there.
        AttributeError: any other name, with a hint if the wrapped optimizer has such a method."""
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # the error of a property
        method = None if name.startswith("_") else getattr(vars(self).get("optimizer"), name, None)
        if name in ("train", "eval") and callable(method):
            return partial(self._run_on_masters, method)
        hint = f"; optimizer.optimizer.{name} is that of the wrapped optimizer" if callable(method) else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def _run_on_masters(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method that changes weights, with masters in the optimizer's groups; then publish them. Collective."""
        store = self.executor.store
        store.settle()
        with store.swap_groups(store.by_group):
            result = method(*args, **kwargs)
        self.access.publish()
        return result

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    state = property(attrgetter("optimizer.state"))
    defaults = property(attrgetter("optimizer.defaults"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch: parameters that were frozen, or in no optimizer, train from their first gradient
        on."""
        self.optimizer.add_param_group(param_group)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run ``engine.backward(loss)`` without dividing by the accumulation steps, which the caller has done."""
        backward = self.differentiate()
        if backward is None:
            raise RuntimeError("optimizer.backward(loss) needs the engine of this optimizer, now gone")
        backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def step(self, closure: None = None) -> None:
        """Unscale, clip, update and publish; an overflow skips the step. ``closure`` is not supported."""
        if closure is not None:
            raise ValueError("closure is not supported: call engine.backward() and engine.step()")
        self.before_direct_step()
        self.last = self.executor.step()
        self.executor.reducer.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, except between the micro-batches of an update, as ``engine.zero_grad`` does."""
        if self.clock is None or not self.clock.mid_update:
            self.executor.reducer.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: its part of each parameter by name with its interval, the groups, and the loss
        scale."""
        return {
            "zero_stage": self.executor.plan.zero.stage,
            "shards": {
                index.name: {
                    "start": index.start,
                    "stop": index.stop,
                    **{k: v.clone() for k, v in tensors.items()},
                }
                for index, tensors in self.access.local_states()
            },
            "param_groups": copy.deepcopy(self.access.param_groups),
            **self.access.scalars(),
        }

    def load_state_dict(self, state: dict[str, Any], **_: Any) -> None:
        """Load a ``state_dict`` of the same partitioning; ``engine.load_checkpoint`` loads any other."""
        shards: dict[str, Any] = state["shards"]
        for index, _tensors in self.access.local_states():
            saved = shards.get(index.name)
            if saved is None or (saved["start"], saved["stop"]) != (index.start, index.stop):
                raise ValueError(
                    f"the state of {index.name} was saved for a different partitioning: use engine.load_checkpoint"
                )
        self.access.write_local_states(
            {
                name: {key: value for key, value in shard.items() if key not in ("start", "stop")}
                for name, shard in shards.items()
            }
        )
        self.access.param_groups = copy.deepcopy(state["param_groups"])
        self.access.load_scalars(state)
        self.access.publish()

    # What clients of the system read ------------------------------------------------------------------------

    loss_scale = property(attrgetter("executor.scaler.scale"))
    cur_scale = property(attrgetter("executor.scaler.scale"))
    dynamic_loss_scale = property(attrgetter("executor.scaler.dynamic"))
    loss_scaler = property(attrgetter("executor.scaler"))

    loss_scale_config = loss_scaler  # live, with ``cur_scale``, ``cur_iter``, ``scale_window`` and others
    cur_iter = property(attrgetter("executor.scaler.cur_iter"))
    last_overflow_iter = property(attrgetter("executor.scaler.last_overflow_iter"))
    scale_window = property(attrgetter("executor.scaler.scale_window"))
    scale_factor = property(attrgetter("executor.scaler.scale_factor"))
    min_loss_scale = property(attrgetter("executor.scaler.min_scale"))

    @property
    def low_precision_dtype(self) -> torch.dtype:
        """Return the dtype of the model's own weights."""
        return self.executor.plan.precision.param or torch.float32

    def needs_scaler(self) -> bool:
        """Return whether a loss has to be multiplied by the loss scale before its backward (fp16)."""
        return self.executor.scaler.plan.active

    def scale_if_loss(self, value: Any) -> Any:
        """Return a scalar that has a graph times the loss scale, anything else unchanged."""
        if isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None:
            return value * self.executor.scaler.scale
        return value

    def override_loss_scale(self, loss_scale: float) -> None:
        """Set the loss scale from outside, as some pipelines do. ValueError: not finite and positive."""
        if not math.isfinite(loss_scale) or loss_scale <= 0:
            raise ValueError(f"loss_scale must be finite and greater than 0, not {loss_scale!r}")
        self.executor.scaler.scale = self.external_loss_scale = float(loss_scale)

    @property
    def overflow(self) -> bool:
        """Return whether the last step was skipped because of a non-finite gradient."""
        return self.last is not None and not self.last.applied

    @property
    def check_grad_overflow(self) -> bool:
        """Return whether steps with non-finite gradients are skipped: always in fp16, in bf16 with
        ``bf16.check_grad_overflow``."""
        return self.executor.plan.precision.check_overflow

    def check_overflow(self, *_: Any, **__: Any) -> bool:
        return self.overflow

    @property
    def _global_grad_norm(self) -> float:
        return self.scaled_global_norm()

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """Return this rank's parts of the summed gradients by optimizer group; empty before the backward of a
        boundary and after the step."""
        if any(bucket.reduced is None for bucket in self.executor.reducer.buckets):
            return {}
        self.executor.reducer.finish_copies()
        return {
            number: [owned.gradient() for owned in group]
            for number, group in enumerate(self.executor.store.by_group)
        }

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Return ``averaged_gradients`` in fp32 by parameter: group -> position in the group -> flat part, which may
        be empty. They include the loss scale."""
        if not self.averaged_gradients:
            return {}
        parts: dict[int, dict[int, Tensor]] = {}
        for number, group in enumerate(self.param_groups):
            for place, param in enumerate(group["params"]):
                if self.access.name_of(param) is not None:
                    part = self.access.local_gradient(param)
                    parts.setdefault(number, {})[place] = torch.empty(0) if part is None else part.float()
        return parts

    def refresh_fp32_params(self) -> None:
        """Set the master weights from the model's own, after these were loaded or edited."""
        with torch.no_grad():
            self.executor.store.refresh_masters()

    def update_lp_params(self) -> None:
        """Set the model's own weights from the master weights, after these were loaded or edited. Collective."""
        self.access.publish()

    clip_grad = property(attrgetter("executor.plan.gradients.clip"))

    def scaled_global_norm(self, norm_type: float = 2) -> float:
        """Return the norm of the averaged gradients at the last step, before clipping."""
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type}: only the 2-norm is available")
        return self.last.norm if self.last is not None else 0.0

    def get_lr(self) -> float:
        return self.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    @property
    def bit16_groups(self) -> list[list[Tensor]]:
        """Return the model's parameters by optimizer group."""
        return [list(group["params"]) for group in self.param_groups]

    fp16_groups = bf16_groups = bit16_groups

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """This rank's master weights, one flat tensor per optimizer group (a copy)."""
        self.executor.store.settle()
        flat = []
        for group in self.executor.store.by_group:
            masters = [owned.master.detach().view(-1) for owned in group]
            flat.append(torch.cat(masters) if masters else torch.empty(0))
            setattr(flat[-1], JOINED, list(group))  # its state can be looked up, too
        return flat

    @property
    def params_in_partition(self) -> list[list[Tensor]]:
        params = self.executor.store.params
        return [[params[owned.param_index] for owned in group] for group in self.executor.store.by_group]

    @property
    def partition_count(self) -> list[int]:
        """Return the number of shards of each optimizer group's state (with experts: the largest)."""
        buckets = self.executor.store.param_buckets
        shards = {id(param): bucket.layout.num_shards for bucket in buckets for param in bucket.params}
        return [
            max((shards[id(param)] for param in group["params"] if id(param) in shards), default=1)
            for group in self.param_groups
        ]

    dp_process_group = property(attrgetter("executor.communicator.group"))

    def destroy(self) -> None:
        self.executor.close()


def _flat(bucket: ParamBucket) -> list[Tensor]:
    return [bucket.full] if bucket.full is not None else [param.data.view(-1) for param in bucket.params]


class DeepSpeedZeroOptimizer(ZeroOptimizer):
    """Optimizer of stages 1 and 2 (documented as ``deepspeed.zero.optimizer.DeepSpeedZeroOptimizer``)."""

    nccl_start_alignment_factor = 2
    """Shards start at a multiple of this many elements; in fact of ``layout.ALIGNMENT``."""

    @property
    def bit16_groups_flat(self) -> list[Tensor]:
        """Return the model's live weights: one flat tensor per sharded bucket, or per parameter that is not sharded."""
        return [flat for bucket in self.executor.store.param_buckets for flat in _flat(bucket)]

    @property
    def real_dp_process_group(self) -> list[Any]:
        """Return the process group of each tensor of ``bit16_groups_flat``."""
        return [
            bucket.communicator.group for bucket in self.executor.store.param_buckets for _ in _flat(bucket)
        ]

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[Tensor]]:
        """Return the model's live weights by bucket and rank."""
        return [
            list(bucket.full.chunk(bucket.layout.num_shards))
            if bucket.full is not None
            else [param.data.view(-1) for param in bucket.params]
            for bucket in self.executor.store.param_buckets
        ]


class DeepSpeedZeroOptimizer_Stage3(ZeroOptimizer):
    """Optimizer of stage 3 (documented as ``deepspeed.zero.optimizer.DeepSpeedZeroOptimizer_Stage3``)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        executor: StepExecutor,
        access: StateAccess,
        mover: StateMover,
        parameter_offload: DeepSpeedZeRoOffload,
    ) -> None:
        super().__init__(optimizer, executor, access, mover)
        self.parameter_offload = parameter_offload

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's master weights, one flat tensor per optimizer group (a copy)."""
        return ZeroOptimizer.single_partition_of_fp32_groups.fget(self)  # type: ignore[attr-defined]

    @property
    def fp16_partitioned_groups(self) -> list[list[Tensor]]:
        """Return this rank's parts of the model's parameters (``ds_tensor``) by optimizer group."""
        return [[param.ds_tensor for param in group["params"]] for group in self.param_groups]

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        raise AttributeError(
            "single_partition_of_fp32_groups exists at stages 1 and 2; see fp32_partitioned_groups_flat"
        )

    persistent_parameters = property(attrgetter("parameter_offload.persistent_parameters"))
    leaf_parameters = property(attrgetter("parameter_offload.leaf_parameters"))

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> Tensor | None:
        """Return the whole fp32 weight, or the state ``optim_state_key`` (``exp_avg``, ...). Collective."""
        if optim_state_key is None:
            return self.access.full_master(param)
        return self.access.full_state(param, optim_state_key)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """Return the whole reduced gradient in fp32; None if there is none yet. Collective."""
        return self.access.full_gradient(param)

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Do nothing: groups always hold the parameters, and state is looked up by them."""

    _clear_fp32_optimizer_param_groups = _set_fp32_optimizer_param_groups

    def quantize_nontrainable_params(self) -> None:
        """Do nothing: with ``zero_quantized_nontrainable_weights`` the engine gathers frozen weights in 8 bits from
        its first step on."""

    def empty_partition_cache(self) -> None:
        """Reshard every gathered parameter that is not in use."""
        self.parameter_offload.empty_partition_cache()


class WholeMasters(ZeroOptimizer):
    """Optimizer of stage 0 with 16-bit weights: every rank has all master weights."""

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """Return the master weights, one flat tensor per optimizer group (a copy)."""
        return self.single_partition_of_fp32_groups

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        """Return the master weights of each optimizer group, in the shapes of the parameters (copies)."""
        groups = [
            [self.access.full_master(param) for param in group["params"]] for group in self.param_groups
        ]
        return [[master for master in group if master is not None] for group in groups]

    def _divisor(self, total_norm: float) -> float:
        """Return the divisor of a step for gradients whose norm, times the loss scale, is ``total_norm``."""
        scale = self.loss_scale
        return scale / clip_coefficient(total_norm / scale, self.clip_grad)


class FusedMasters(WholeMasters):
    """Facade of FusedAdam or a 1-bit Adam: an instance of ``deepspeed.compat.fp16.fused_optimizer.FP16_Optimizer``."""

    def unscale_and_clip_grads(
        self, grad_groups_flat: Sequence[Tensor], total_norm: float, apply_scale: bool = True
    ) -> float:
        """Divide ``grad_groups_flat``, whose norm is ``total_norm``, by the loss scale and for clipping, as a step
        does. Return the divisor; ``apply_scale=False`` only computes it."""
        divisor = self._divisor(total_norm)
        if apply_scale and divisor != 1.0:
            for grads in grad_groups_flat:
                grads.div_(divisor)
        return divisor


class BF16_Optimizer(FusedMasters, abc.ABC):
    """Facade for bf16 weights whose gradients accumulate in fp32 (documented as
    ``deepspeed.zero.optimizer.BF16_Optimizer``); clients check for either class."""


@BF16_Optimizer.register
class ShardedBF16Optimizer(DeepSpeedZeroOptimizer):
    """Facade of stage 1 for such weights, on the device: for clients an instance of both documented classes."""


class UnfusedMasters(WholeMasters):
    """Facade of any other optimizer: an instance of ``deepspeed.compat.fp16.fused_optimizer.FP16_UnfusedOptimizer``
    for clients that check."""

    def unscale_and_clip_grads(self, total_norm: float, apply_scale: bool = True) -> float:
        """Return the divisor, loss scale and clipping combined, for gradients whose norm, times the loss scale, is
        ``total_norm``. ``apply_scale`` has no effect: a step divides while it updates."""
        return self._divisor(total_norm)

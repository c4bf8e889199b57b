"""MoQ in an engine (``quantize_training``): 16-bit weights are quantized after each update, on a schedule that may be
stretched by the curvature of each block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepspeed.base.logging import is_rank_zero
from deepspeed.compression.eigenvalue import Eigenvalue
from deepspeed.compression.moq import MoQQuantizer
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters

if TYPE_CHECKING:
    from deepspeed.config.sections.compression import EigenvalueConfig, QuantizeTrainingConfig
    from deepspeed.engine.interface import Engine

PREFIX = "Train/Eigenvalues/ModelBlockParam_"


def attach_quantization(engine: Engine) -> None:
    """Attach the engine's ``quantizer`` and the measurement of eigenvalues, if configured."""
    section = engine._config.schema.quantize_training
    if section is None or engine.core is None:
        return
    curvature = None
    if section.eigenvalue is not None and section.eigenvalue.enabled:
        curvature = Curvature(engine, section.eigenvalue)
    if section.enabled:
        QuantizedUpdates(engine, section, curvature)


class Curvature:
    """Measures each block's eigenvalue at every ``gas_boundary_resolution``-th step, in the backward of its last
    micro-batch, for the loss averaged over ranks.

    ``values``: ``{id(parameter): (eigenvalue relative to the largest, block)}`` of the last measurement.
    """

    def __init__(self, engine: Engine, section: EigenvalueConfig) -> None:
        self.engine = engine
        self.values: dict[int, tuple[float, int]] = {}
        self.measure = Eigenvalue(**section.model_dump(exclude={"enabled"}))
        self.measure.get_layers(engine.module)
        self._forward = contextlib.ExitStack()
        self._whole = contextlib.ExitStack()
        events = engine.events
        events.on("before_forward", self.before_forward)
        events.on("after_forward", self.after_forward)
        events.on("before_backward", self.before_backward)
        events.on("on_error", self.give_up)
        if engine.monitor.enabled and is_rank_zero():
            events.on("after_step", self.write)
        self._new = False

    def _due(self) -> bool:
        engine = self.engine
        if engine.quantizer is not None and not engine.quantizer.any_precision_switch():
            return False
        wanted = engine.global_steps % self.measure.gas_boundary_resolution == 0
        return wanted and engine.is_gradient_accumulation_boundary() and engine.module.training

    def before_forward(self, **_: Any) -> None:
        """Disable fused attention, which has no second derivative. At stage 3 gather all weights until the
        eigenvalues are computed, as each needs many derivatives of all later layers."""
        if not torch.is_grad_enabled() or not self._due():
            return
        self._forward.enter_context(sdpa_kernel(SDPBackend.MATH))
        if self.engine.plan.zero.shard_params:
            self._whole.close()  # left by a forward without a backward
            self._whole.enter_context(GatheredParameters(list(self.engine.module.parameters())))

    def after_forward(self, **_: Any) -> None:
        self._forward.close()

    def give_up(self, **_: Any) -> None:
        self._forward.close()
        self._whole.close()

    def before_backward(self, *, loss: Tensor | None, **_: Any) -> None:
        with self._whole:
            if loss is not None and self._due():
                self._measure(loss)

    def _measure(self, loss: Tensor) -> None:
        layers = list(self.measure.get_layers(self.engine.module))[: self.measure.layer_num]
        blocks = [[param for param in layer.parameters() if param.requires_grad] for layer in layers]
        flat = [param for block in blocks for param in block]
        slopes = iter(
            torch.autograd.grad(loss, flat, create_graph=True, allow_unused=True, materialize_grads=True)
        )
        gradients = [[next(slopes) for _ in block] for block in blocks]
        self.values = self.measure.of_blocks(blocks, gradients, summed=self._mean)
        self._new = True

    def _mean(self, parts: Sequence[Tensor]) -> list[Tensor]:
        ranks = self.engine.replica_groups.all_ranks
        flat = torch.cat([part.reshape(-1).float() for part in parts])
        ranks.all_reduce(flat, scale=1.0 / ranks.size).wait()
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view_as(part).to(part.dtype) for piece, part in zip(pieces, parts, strict=True)]

    def write(self, **_: Any) -> None:
        if not self._new:
            return
        self._new = False
        by_block = {block: value for value, block in self.values.values()}
        values = {str(block): value for block, value in sorted(by_block.items())}
        self.engine.monitor.write_events(self.engine.curve_axis.events(values, PREFIX))


class QuantizedUpdates:
    """Quantizes all matrices that the optimizer updates, from step ``schedule_offset`` on. Its state is
    checkpointed."""

    def __init__(self, engine: Engine, section: QuantizeTrainingConfig, curvature: Curvature | None) -> None:
        if engine.plan.precision.master is None:
            raise DeepSpeedConfigError(
                "quantize_training.enabled=true with training in fp32: it quantizes 16-bit weights and "
                "keeps exact fp32 masters; use fp16 or bf16, or compression_training.weight_quantization"
            )
        assert engine.core is not None
        self.engine, self.curvature = engine, curvature
        self.offset = section.quantize_schedule.schedule_offset
        algorithm = section.quantize_algo
        kind = section.quantize_type or algorithm.q_type
        self.quantizer = engine.quantizer = MoQQuantizer(
            q_groups=section.quantize_groups,
            q_mixed_fp16=section.fp16_mixed_quantize.enabled,
            q_change_ratio=section.fp16_mixed_quantize.quantize_change_ratio,
            q_type=int(kind == "asymmetric"),
            q_rounding=int(algorithm.rounding == "stochastic"),
            q_verbose=section.quantize_verbose,
            q_eigenvalue=curvature is not None,
            use_quantizer_kernel=section.quantizer_kernel,
            layer_num=curvature.measure.layer_num if curvature is not None else 0,
        )
        if engine.plan.zero.shard_params:
            self.quantizer.whole = _whole
        names = engine.core.access.names
        self.params: dict[str, Any] = {
            name: param
            for name, param in zip(names, engine.core.store.params, strict=True)
            if len(_shape(param)) > 1
        }
        for name, param in self.params.items():
            if _shape(param).numel() % section.quantize_groups:
                raise DeepSpeedConfigError(
                    f"quantize_training.quantize_groups={section.quantize_groups} does not divide {name}, which has "
                    f"{_shape(param).numel()} values"
                )
            param.start_bits = section.quantize_bits.start_bits
            param.target_bits = section.quantize_bits.target_bits
            param.q_period = section.quantize_schedule.quantize_period
        engine.checkpointed_observers["quantizer"] = self
        engine.events.on("after_update", self.after_update)

    def after_update(self) -> None:
        engine = self.engine
        if engine.global_steps <= self.offset or not engine.was_step_applied():
            return
        values = self.curvature.values if self.curvature is not None else {}
        self.quantizer.quantize([self.params.values()], False, bool(values), values)

    def state_dict(self) -> dict[str, Any]:
        quantizer = self.quantizer
        return {
            "qsteps": quantizer.qsteps,
            "quantize_real_ratio": quantizer.quantize_real_ratio,
            "params": {name: [param.start_bits, param.q_period] for name, param in self.params.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, and quantize the weights, which were loaded exactly."""
        quantizer = self.quantizer
        quantizer.qsteps = state_dict["qsteps"]
        quantizer.quantize_real_ratio = state_dict["quantize_real_ratio"]
        for name, (bits, period) in state_dict["params"].items():
            if name in self.params:
                self.params[name].start_bits, self.params[name].q_period = bits, period
        if quantizer.qsteps:
            for param in self.params.values():
                with torch.no_grad(), quantizer.whole(param):
                    param.data.copy_(quantizer.quantized(param))


def _shape(param: Any) -> torch.Size:
    """Return the unsharded shape, also of a partitioned parameter."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


@contextlib.contextmanager
def _whole(param: Any) -> Iterator[None]:
    """Gather a partitioned parameter, and write its new value to the 16-bit shards, not to the fp32 masters. One at a
    time, so that no rank holds the whole model. Collective."""
    with GatheredParameters([param]):
        yield
        param.ds_owner.write_param(param.ds_position, param.data)
    param.ds_owner.shards_written()

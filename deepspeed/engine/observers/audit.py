"""The section `audit`: fingerprints of what each recorded step computed, in one file per rank
(``observe/audit/records.py``).

A step is recorded where its tensors exist: the batches at each forward, the gradients between their sum and the update,
the weights after it. Ranks do not communicate, except for the proof of sums (``ReductionProof``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import logger
from deepspeed.base.sharded import full_numel, full_shape
from deepspeed.checkpoint.placement import placement_of
from deepspeed.config.plan import Cadence
from deepspeed.config.sections.profiling import AuditConfig
from deepspeed.engine.observers.folders import make_folder
from deepspeed.engine.observers.progress.readings import LossMeter
from deepspeed.observe.audit.fingerprints import Fingerprints, batch_entry, entry
from deepspeed.observe.audit.records import GRADIENT, MASTER, WEIGHT, AuditFile
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.layout import UNUSED

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


class Audit:
    """Records the steps that the section selects, and unsubscribes after the last one. In other steps, it costs one
    call per forward."""

    def __init__(self, engine: Engine, config: AuditConfig) -> None:
        self.engine, self.config = engine, config
        if engine.core is None:
            logger.warning("audit: this engine has no optimizer, so there are no steps to record")
            return
        self.core, self.access = engine.core, engine.core.access
        self.folder = make_folder("audit.record", config.record)
        self.file: AuditFile | None = None
        self.fingerprints = Fingerprints(engine.device)
        self.proof = ReductionProof(engine, config.prove_buckets)
        self.line: dict[str, Any] | None = None  # of the step being recorded
        self.meter = LossMeter(engine)
        self._subscriptions = (
            ("before_forward", self.before_forward),
            ("before_backward", self.before_backward),
            ("at_boundary", self.at_boundary),
            ("after_step", self.after_step),
            ("on_error", self.drop),
            ("on_destroy", self.end),
        )
        for event, subscriber in self._subscriptions:
            engine.events.on(event, subscriber)
        self.core.executor.before_step.append(self.read_gradients)

    # One step -----------------------------------------------------------------------------------------------

    def before_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], **_: Any) -> None:
        if torch.is_grad_enabled() and self.engine.module.training:
            line = self._open()
            if line is not None:
                named = dict(_tensors(kwargs, "")) | dict(_tensors(inputs, "inputs"))
                line["batches"].append(batch_entry(self.fingerprints, named))

    def before_backward(self, **_: Any) -> None:
        self._open()  # a pipeline's forwards do not call the engine's

    def _open(self) -> dict[str, Any] | None:
        step = self.engine.global_steps + 1
        if self.line is None and self.config.wants(step):
            if self.file is None:
                self.file = AuditFile(self.folder, self.engine.global_rank, run_info(self.engine))
                self.file.write({"step": 0, WEIGHT: self._weights(), MASTER: self._masters()})
            self.line = {"step": step, "seed": torch.initial_seed(), "random": _random_state(), "batches": []}
            self.meter.listen()
            self.proof.begin(step)
        return self.line

    def at_boundary(self, **_: Any) -> None:
        if self.line is not None:
            self.line["loss"] = self.meter.take()
            self.line["loss_scale"] = self.core.scaler.scale
            self.line["lr"] = self.engine.get_lr()

    def read_gradients(self) -> None:
        """Record the gradients when all are summed and none is clipped."""
        if self.line is None:
            return
        if has_plain_gradients(self.engine):
            self.line["proof"] = self.proof.check()
            self.line[GRADIENT] = self._gradients()
        else:
            self.proof.forget()

    def after_step(self, **_: Any) -> None:
        if self.line is None or self.engine.global_steps < self.line["step"]:
            return
        assert self.file is not None
        self.line["norm"] = self.engine.get_global_grad_norm()
        self.line["applied"] = self.engine.was_step_applied()
        self.line[MASTER], self.line[WEIGHT] = self._masters(), self._weights()
        self.file.write(self.line)
        self.line = None
        if self.engine.global_steps >= self.config.last_step:
            self.end()

    def drop(self, **_: Any) -> None:
        """Discard the record of a batch that an exception ends: it is recorded when the batch is repeated."""
        self.line = None
        self.meter.forget()
        self.proof.forget()

    def end(self, **_: Any) -> None:
        self.drop()
        for event, subscriber in self._subscriptions:
            self.engine.events.off(event, subscriber)
        self.core.executor.before_step.remove(self.read_gradients)
        self._subscriptions = ()

    # What is recorded ---------------------------------------------------------------------------------------

    def _params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for each in self.access.trainable():
            if full_numel(each.param):
                yield label(each.name, each.param), each.param

    def _gradients(self) -> dict[str, Any]:
        """Return this rank's parts, without the loss scale."""
        scale, found = self.core.scaler.scale, {}
        for name, param in self._params():
            part = self.access.local_gradient(param)
            if part is not None and part.numel():
                values = part if scale == 1.0 else part.float() / scale
                found[name] = self._entry(values, self.access.interval(param)[0])
        return found

    def _masters(self) -> dict[str, Any]:
        return {
            name: self._entry(part, self.access.interval(param)[0])
            for name, param in self._params()
            if (part := self.access.local_master(param)).numel()
        }

    def _weights(self) -> dict[str, Any]:
        """Return the weights of the next forward: whole parameters as they are here, this rank's shard of the
        others."""
        found = {}
        for name, param in self._params():
            whole = param.numel() == full_numel(param)
            part = param.data if whole else self.access.local_weight(param)
            if part.numel() and part.untyped_storage().nbytes():  # not if it rests in a file
                found[name] = self._entry(part, 0 if whole else self.access.interval(param)[0])
        return found

    def _entry(self, part: Tensor, start: int) -> list[Any]:
        return entry(start, part.numel(), self.fingerprints.part(part.detach(), start).cpu())


def label(name: str, param: Tensor) -> str:
    """Return the name of a tensor, and which part it is if it is split over model-parallel ranks."""
    boxes = placement_of(param).boxes
    if not boxes:
        return name
    return (
        name
        + " "
        + " and ".join(str([f"{low}:{high}" for low, high in box]) for box in boxes).replace("'", "")
    )


def has_plain_gradients(engine: Engine) -> bool:
    """Return whether summed gradients can be read before the update: not if each rank updates with its own gradients,
    or if an update on the host has already begun."""
    plan, core = engine.plan, engine.core
    assert core is not None
    return core.reducer.cadence is not Cadence.NEVER and plan.zenflow is None and not plan.speculates


def run_info(engine: Engine) -> dict[str, Any]:
    """Return what `ds diff` needs to know about this rank's run."""
    assert engine.core is not None
    modules = dict(engine.module.named_modules(remove_duplicate=False))
    parameters = {
        label(each.name, each.param): {
            "shape": list(full_shape(each.param)),
            "module": type(modules.get(each.name.rpartition(".")[0], engine.module)).__name__,
        }
        for each in engine.core.access.trainable()
    }
    return {
        "rank": engine.global_rank,
        "ranks": engine.world_size,
        "data": engine.mesh.rank("tp") == 0 and engine.mesh.rank("pp") == 0,
        "stage": engine.plan.zero.stage,
        "numerics": numerics_of(engine),
        "parameters": parameters,
    }


def numerics_of(engine: Engine) -> dict[str, Any]:
    """Return the settings that determine the bits: runs in which all of them are equal compute the same bits, at any
    stage."""
    plan, core = engine.plan, engine.core
    assert core is not None
    precision, accumulation = plan.precision, engine._config.gradient_accumulation_steps
    return {
        "data-parallel ranks": engine.seq_dp_world_size,
        "model-parallel ranks": [engine.mesh.size(axis) for axis in ("tp", "pp", "sp")],
        "micro-batch": engine._config.train_micro_batch_size_per_gpu,
        "accumulation steps": accumulation,
        "precision": precision.name,
        "dtypes": [
            str(each) for each in (precision.param, precision.accumulate, precision.reduce, precision.master)
        ],
        "cadence of sums": core.reducer.cadence.name if accumulation > 1 else "any",
        "bits of packed gradients and weights": [plan.packing.gradients, plan.packing.weights],
        "shards of MiCS": max(engine.replica_groups.mics_shard_size, 0),
        "device": engine.device.type,
        "updated on": "cpu" if plan.state_offload is not None else engine.device.type,
        "torch": torch.__version__,
    }


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested inputs, with names such as ``inputs[0]`` or ``labels``."""
    if isinstance(value, Tensor):
        if value.numel() and not value.is_complex():
            yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}[{number}]")


def _random_state() -> list[int]:
    """Return checksums of the states of torch's random generators."""
    accelerator = get_accelerator()
    states = [torch.get_rng_state()]
    if accelerator.device_name() != "cpu":
        states.append(accelerator.get_rng_state())
    return [zlib.crc32(bytes(state.tolist())) for state in states]


# A proof that the gradients used by the update are the sums of those that autograd computed.
#
# A hook on each parameter sees a gradient before the engine does. Their sum over this rank's backwards, all-reduced by
# torch in fp64, must equal the result of the engine's buckets, wire formats and shards, up to rounding.


class ReductionProof:
    """Checks ``buckets`` gradient buckets per step, different ones in each step. All ranks check the same ones."""

    def __init__(self, engine: Engine, buckets: int) -> None:
        self.engine = engine
        self.core: Any = engine.core  # None if the engine does not train: then nothing is recorded or proved
        # Sums are exact up to rounding: not with quantized payloads, or without any sum.
        sums = engine.core is not None and engine.core.reducer.cadence is not Cadence.NEVER
        self.buckets = buckets if sums and not engine.plan.packing.loses else 0
        self.step = 0
        self._chosen: list[int] = []
        # By parameter: [2, numel], the sum of its gradients and of their absolute values.
        self._seen: dict[int, Tensor] = {}
        self._passes: dict[int, int] = {}
        self._handles: list[Any] = []

    def begin(self, step: int) -> None:
        self.forget()
        core = self.core
        there = len(core.reducer.buckets)
        first = (step - 1) * self.buckets
        self._chosen = sorted({(first + i) % there for i in range(min(self.buckets, there))}) if there else []
        self.step = step
        for b in self._chosen:
            for index in _trained(core.reducer.buckets[b]):
                param = core.reducer.params[index]
                if param.requires_grad:
                    self._handles.append(param.register_hook(self._hook(index)))

    def _hook(self, index: int) -> Any:
        def see(grad: Tensor) -> None:
            dense = grad.detach()
            flat = (dense.to_dense() if dense.layout is not torch.strided else dense).reshape(-1).double()
            seen = torch.stack([flat, flat.abs()])
            known = self._seen.get(index)
            self._seen[index] = seen if known is None else known.add_(seen)
            self._passes[index] = self._passes.get(index, 0) + 1

        return see

    def check(self) -> list[dict[str, Any]]:
        """Return the findings by bucket, after all gradients are summed. Collective."""
        found = []
        if self._chosen and not self._any_late():
            found = [self._check(b, self.core.reducer.buckets[b]) for b in self._chosen]
        self.forget()
        return found

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen, self._passes, self._chosen = [], {}, {}, []

    def _any_late(self) -> bool:
        """Return whether any rank has gradients that arrived after their bucket was summed: they are added later."""
        reducer = self.core.reducer
        late = torch.tensor([float(bool(reducer.late))], device=reducer.device)
        reducer.communicator.all_reduce(late).wait()
        return bool(late.item())

    def _check(self, b: int, bucket: GradBucket) -> dict[str, Any]:
        core = self.core
        wrong, worst = [], 0.0
        for index in _trained(bucket):
            error = self._error(index, bucket, core.reducer.params[index])
            worst = max(worst, error)
            if not error <= 1.0:
                wrong.append(core.access.names[index])
        if wrong:
            logger.error(
                f"audit: in step {self.step} the sum of gradient bucket {b} does not match the gradients of "
                f"the ranks: {', '.join(wrong[:4])}{', ...' if len(wrong) > 4 else ''} differ by up to "
                f"{worst:.3g} times what rounding explains"
            )
        return {"bucket": b, "equal": not wrong, "parameters": wrong, "error": worst}

    def _error(self, index: int, bucket: GradBucket, param: nn.Parameter) -> float:
        """Return the largest error of an element, in multiples of the rounding bound. Collective."""
        core = self.core
        all_ranks = self.engine.replica_groups.of(param).all_ranks
        seen = self._seen.get(index)
        if seen is None:
            seen = torch.zeros(2, full_numel(param), dtype=torch.float64, device=self.engine.device)
        if all_ranks.size > 1:
            dist.all_reduce(seen, group=all_ranks.group)
        before, after = self.engine.facts.gradient_rule().factors(
            self.engine.replica_groups.of(param).divisor
        )
        expected, size = seen * (before * after)
        whole = core.access.full_gradient(param)
        if whole is None or not param.numel() and not full_numel(param):
            return 0.0
        terms = all_ranks.size + self._passes.get(index, 1) + 1
        rounding = max(torch.finfo(dtype).eps for dtype in (bucket.dtype, bucket.wire_dtype))
        bound = size * (terms * rounding) + torch.finfo(bucket.wire_dtype).tiny
        got = whole.reshape(-1).double()
        excess = (got - expected).abs() / bound
        finite = expected.isfinite() & got.isfinite()
        excess = torch.where(
            finite, excess, torch.where(expected.isfinite() == got.isfinite(), 0.0, torch.inf)
        )
        return float(excess.max()) if excess.numel() else 0.0


def _trained(bucket: GradBucket) -> list[int]:
    return [slot.param for slot in bucket.layout.slots if slot.param != UNUSED and slot.numel]

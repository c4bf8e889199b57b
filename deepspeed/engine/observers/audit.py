"""The section `audit`: what every recorded step computed, in the file of this rank (``observe/audit/records.py``).

A step is read where its numbers exist: its batches at each forward, the gradients between their sum and the update,
the weights after it. No rank asks another one, apart from the proof of sums (``reduction_proof.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import logger
from deepspeed.base.sharded import full_numel, full_shape
from deepspeed.checkpoint.placement import placement_of
from deepspeed.config.plan import Cadence
from deepspeed.config.sections.profiling import AuditConfig
from deepspeed.engine.observers.folders import make_folder
from deepspeed.engine.observers.progress.readings import LossMeter
from deepspeed.engine.observers.reduction_proof import ReductionProof
from deepspeed.observe.audit.fingerprints import Fingerprints, batch_entry, entry
from deepspeed.observe.audit.records import GRADIENT, MASTER, WEIGHT, AuditFile

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


class Audit:
    """Records the steps that the section asks for; after the last one it is gone. Between them a forward costs a
    call."""

    def __init__(self, engine: Engine, config: AuditConfig) -> None:
        self.engine, self.config = engine, config
        if engine.core is None:
            logger.warning("audit: this engine has no optimizer, so that there are no steps to record")
            return
        self.core, self.access = engine.core, engine.core.access
        self.folder = make_folder("audit.record", config.record)
        self.file: AuditFile | None = None
        self.fingerprints = Fingerprints(engine.device)
        self.proof = ReductionProof(engine, config.prove_buckets)
        self.line: dict[str, Any] | None = None  # of the step that is being recorded
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
        self._open()  # the forwards of a pipeline are not the engine's

    def _open(self) -> dict[str, Any] | None:
        step = self.engine.global_steps + 1
        if self.line is None and self.config.wants(step):
            if self.file is None:
                self.file = AuditFile(self.folder, self.engine.global_rank, facts_of(self.engine))
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
        """All gradients are summed, and nothing is clipped."""
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
        """An exception ends the batch: it will be recorded when it is taken again."""
        self.line = None
        self.meter.forget()
        self.proof.forget()

    def end(self, **_: Any) -> None:
        self.drop()
        for event, subscriber in self._subscriptions:
            self.engine.events.off(event, subscriber)
        self.core.executor.before_step.remove(self.read_gradients)
        self._subscriptions = ()

    # What is read -------------------------------------------------------------------------------------------

    def _params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for each in self.access.trainable():
            if full_numel(each.param):
                yield label(each.name, each.param), each.param

    def _gradients(self) -> dict[str, Any]:
        """This rank's parts, without the loss scale."""
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
        """Return what the next forward reads, of each parameter that is whole here; this rank's shard of the others."""
        found = {}
        for name, param in self._params():
            whole = param.numel() == full_numel(param)
            part = param.data if whole else self.access.local_weight(param)
            if part.numel() and part.untyped_storage().nbytes():  # not where it is kept in a file
                found[name] = self._entry(part, 0 if whole else self.access.interval(param)[0])
        return found

    def _entry(self, part: Tensor, start: int) -> list[Any]:
        return entry(start, part.numel(), self.fingerprints.part(part.detach(), start).cpu())


def label(name: str, param: Tensor) -> str:
    """The name, and which part of a tensor that is split over the ranks of a model."""
    boxes = placement_of(param).boxes
    if not boxes:
        return name
    return (
        name
        + " "
        + " and ".join(str([f"{low}:{high}" for low, high in box]) for box in boxes).replace("'", "")
    )


def has_plain_gradients(engine: Engine) -> bool:
    """Return whether the sum of gradients can be read before the update: not where each rank updates with its own, or
    where an update on the host has begun already."""
    plan, core = engine.plan, engine.core
    assert core is not None
    return core.reducer.cadence is not Cadence.NEVER and plan.zenflow is None and not plan.speculates


def facts_of(engine: Engine) -> dict[str, Any]:
    """Return what `ds diff` has to know about the run of this rank."""
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
    """Two runs for which all of this is equal compute the same bits, at whatever stage."""
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
    """The tensors in nested inputs, with names such as ``inputs[0]`` or ``labels``."""
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
    """Checksums of the states of torch's generators."""
    accelerator = get_accelerator()
    states = [torch.get_rng_state()]
    if accelerator.device_name() != "cpu":
        states.append(accelerator.get_rng_state())
    return [zlib.crc32(bytes(state.tolist())) for state in states]

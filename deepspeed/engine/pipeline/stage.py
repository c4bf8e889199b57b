"""Parts of the pipeline engine: the stage's work on a micro-batch, and the losses of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.base.accelerator import synchronize_stream
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.pipeline.base import PipelineEngineBase
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.values import to_device
from deepspeed.parallel.pipeline.order_executor import backward_from
from deepspeed.parallel.pipeline.schedules.orders import Action
from deepspeed.parallel.pipeline.split_backward import WeightQueue
from deepspeed.zero.precision import autocast_context


class Stage:
    """The work of one stage (``order_executor.StageCompute``), through the base engine's forward, backward and step."""

    def __init__(self, engine: PipelineEngineBase, losses: BatchLosses, weights: WeightQueue) -> None:
        self._engine = engine
        self._losses = losses
        self.weights = weights
        """Weight gradients deferred by split backwards."""
        self.summed_in: Action | None = None
        """The backward of this batch that overlaps with gradient sums over replicas."""
        self._action: Action | None = None

    def begin(self, action: Action) -> None:
        """Mark ``action`` as in progress, waits included."""
        self._action = action

    def end_batch(self) -> None:
        """Drop the state of the batch, also after a failure."""
        self._action = None
        self.weights.active = False
        self.weights.clear()

    def position(self) -> str:
        """Describe the action in progress; empty between batches."""
        action, engine = self._action, self._engine
        if action is None:
            return ""
        chunk = f" of chunk {action.chunk}" if engine.layout.chunks > 1 else ""
        return f"stage {engine.stage_id}, micro-batch {action.micro_batch}, {action.kind.name.lower()}{chunk}"

    def load(self) -> tuple[Any, Any]:
        """Return inputs and labels of the next micro-batch, on the device."""
        inputs, labels = (to_device(part, self._engine.device) for part in self._engine._next_batch())
        return inputs, labels

    def forward_stage(self, action: Action, inputs: Any, labels: Any) -> Any:
        """Return the outputs of a chunk, or for the last one the loss."""
        outputs = self.layers_forward(inputs, action.chunk)
        is_last = self._engine._channels[action.chunk].outputs is None
        return self.loss_of(outputs, labels) if is_last else outputs

    def layers_forward(self, inputs: Any, chunk: int = 0) -> Any:
        """Return the outputs of a chunk."""
        which = {} if self._engine.layout.chunks == 1 else {"chunk": chunk}
        return DeepSpeedEngine.forward(self._engine, inputs, **which)

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        """Return the loss for the last layer's outputs; without a ``loss_fn`` the outputs themselves."""
        engine = self._engine
        engine.outputs = outputs if not torch.is_grad_enabled() else None
        loss_fn = engine.stage_module.loss_fn
        if loss_fn is None or not engine._compute_loss:
            return outputs
        with autocast_context(engine.plan.precision, engine.device.type):
            loss = loss_fn(outputs, labels)
        self._losses.add(engine.stage_module.get_additional_losses() or {})
        return loss

    def weights_stage(self, action: Action) -> None:
        """Compute the weight gradients deferred by a split backward."""
        with torch.no_grad():
            self.weights.compute((action.micro_batch, action.chunk))

    def synchronize(self) -> None:
        """Wait for this stage's device work, for timing."""
        synchronize_stream()

    def backward_stage(self, action: Action, outputs: Any, gradients: Sequence[Tensor | None]) -> None:
        """Run the backward of one micro-batch; its gradients stay on this rank until the end of the batch."""
        engine = self._engine
        core, plain = engine._require_core("train_batch"), engine._plain_backward
        self.weights.part = (action.micro_batch, action.chunk)
        if action == self.summed_in:
            core.reducer.resume_sums()
        if engine._channels[action.chunk].outputs is None:
            DeepSpeedEngine.backward(engine, outputs)
            return
        engine.events.emit("before_backward", loss=None)
        plain.paused = True
        try:
            core.reducer.before_backward()
            core.reducer.launch_at_end()
            backward_from(outputs, gradients)
            engine._end_backward()
        except BaseException as error:
            engine.abandon_update(error)
            raise
        finally:
            plain.paused = False
        engine.events.emit("after_backward", loss=None, share=None)

    def count_micro_batch(self) -> None:
        """Count a micro-batch after its backward; the last one is counted by the update."""
        if not self._engine.clock.at_boundary:
            DeepSpeedEngine.step(self._engine)


class BatchLosses:
    """The losses of a batch: means over micro-batches and replicas, identical on every rank."""

    def __init__(self, engine: PipelineEngineBase) -> None:
        self._engine = engine
        self._additional: dict[str, Tensor] = {}
        self.reports: dict[str, float] = {}
        """Means of the additional losses of the last batch, by name."""

    def begin_batch(self) -> None:
        """Drop the additional losses of the previous batch."""
        self._additional = {}

    def add(self, parts: dict[str, Any]) -> None:
        """Add the additional losses of a micro-batch, by name."""
        for name, part in parts.items():
            value = part.detach().float() if isinstance(part, Tensor) else torch.tensor(float(part))
            self._additional[name] = self._additional.get(name, torch.zeros(())) + value.cpu()

    def mean(self, losses: list[Any]) -> Tensor:
        """Return the mean over this rank's micro-batches, fp32 []; zero on stages without the loss."""
        if not self._engine.has_loss:
            return torch.zeros((), device=self._engine.device)
        if not all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in losses):
            raise PipelineError("the last stage returned no scalar loss: pass loss_fn to PipelineModule")
        return torch.stack([loss.float().view(()) for loss in losses]).mean()

    def agree(self, losses: list[Any], count: int) -> Tensor:
        """Return the mean over ``count`` micro-batches and replicas, on every rank; store the means of additional
        losses."""
        device = self._engine.device
        parts = {name: value / count for name, value in sorted(self._additional.items())}
        values = [self.mean(losses), torch.tensor(float(len(parts)), device=device)]
        values = self.from_last_stage(self.over_replicas(torch.stack(values)))
        if int(values[1]):
            names = self._names_from_last_stage(list(parts))
            zero = values[0].new_zeros(())
            own = [parts[name].to(device) if parts else zero for name in names]
            means = self.from_last_stage(self.over_replicas(torch.stack(own))).tolist()
            self.reports = dict(zip(names, means, strict=True))
        return values[0]

    def over_replicas(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over the replicas of this stage. Collective."""
        replicas = self._engine.replica_groups.all_ranks
        if replicas.size > 1:
            replicas.all_reduce(values.view(-1)).wait()
            values = values / replicas.size
        return values

    def from_last_stage(self, values: Tensor) -> Tensor:
        """Return the ``values`` of the stage that has the loss. Collective."""
        engine = self._engine
        if engine.num_stages > 1:
            values = values.contiguous()
            engine.replica_groups.across["pp"].broadcast(values.view(-1), src=engine.loss_stage).wait()
        return values

    def _names_from_last_stage(self, names: list[str]) -> list[str]:
        engine = self._engine
        if engine.num_stages > 1:
            message = [names]
            source, group = engine.grid.pp_group[engine.loss_stage], engine.grid.get_pipe_parallel_group()
            dist.broadcast_object_list(message, source, group=group)
            names = message[0]
        return names

"""What the engine of a pipeline computes on its stage: micro-batches forward and backward, and their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.engine.pipeline.facts import PipelineFacts
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.connections import Connections
from deepspeed.parallel.pipeline.messages.values import to_device
from deepspeed.parallel.pipeline.module import PipelineModule
from deepspeed.parallel.pipeline.schedules.choice import Layout
from deepspeed.parallel.pipeline.schedules.orders import Action
from deepspeed.parallel.pipeline.split_backward import WeightQueue
from deepspeed.parallel.pipeline.stage_run import Links, backward_from
from deepspeed.zero.precision import autocast_context


class StageEngine(PipelineFacts):
    """The part of ``PipelineEngine`` that does the work of one stage (``stage_run.StageWork``)."""

    layout: Layout
    loss_stage: int
    data_iterator: Iterator[Any] | None
    batch_fn: Callable[[Any], Any] | None
    change_batch: Callable[[Any], Any] | None = None
    """What is done to every pair (inputs, labels) that is read, after ``batch_fn``."""
    outputs: Any = None
    """Of the last stage for the last micro-batch of an evaluation."""
    _connections: Connections
    _weights: WeightQueue
    _action: Action | None = None
    """At which this stage is, within a batch."""
    _summed_in: Action | None = None
    """The backward during which gradients are summed."""
    _compute_loss: bool = True
    _reports: dict[str, float]
    _additional: dict[str, Tensor]

    @property
    def _links(self) -> list[Links]:
        return self._connections.links

    @property
    def stage_module(self) -> PipelineModule:
        """The wrapped module."""
        module = self.module
        assert isinstance(module, PipelineModule)
        return module

    @property
    def has_loss(self) -> bool:
        """Whether the last layer is on this stage: that of the loss and of the outputs."""
        return self.stage_id == self.loss_stage

    # A micro-batch -------------------------------------------------------------------------------------------

    def _check_batch_begins(self) -> None:
        """PipelineError: micro-batches were accumulated, but not updated with."""
        if self.clock.position:
            raise PipelineError(
                f"{self.clock.position} micro-batches of an unfinished batch were accumulated: call abandon_update() "
                "first, which drops them"
            )

    def begin(self, action: Action) -> None:
        self._action = action

    def position_in_batch(self) -> str:
        action = self._action
        if action is None:
            return ""
        chunk = f" of chunk {action.chunk}" if self.layout.chunks > 1 else ""
        return f"stage {self.stage_id}, micro-batch {action.micro_batch}, {action.kind.name.lower()}{chunk}"

    def load(self) -> tuple[Any, Any]:
        """Inputs and labels of the next micro-batch, on the device."""
        inputs, labels = (to_device(part, self.device) for part in self._next_batch())
        return inputs, labels

    def _next_batch(self) -> Any:
        """Read the next pair (inputs, labels), after ``batch_fn`` and ``change_batch``. PipelineError: it is none."""
        if self.data_iterator is None:
            raise PipelineError(
                "there is no data: give train_batch(data_iter=...), set_dataloader() or training_data= of initialize"
            )
        batch = next(self.data_iterator)
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise PipelineError(
                f"a micro-batch of a pipeline is a pair (inputs, labels), not {type(batch).__name__}: "
                "set_batch_fn() can make one"
            )
        return self.change_batch(batch) if self.change_batch is not None else batch

    def forward_stage(self, action: Action, inputs: Any, labels: Any) -> Any:
        """Outputs of a chunk; of the last one the loss."""
        outputs = self.layers_forward(inputs, action.chunk)
        return outputs if self._links[action.chunk].outputs is not None else self.loss_of(outputs, labels)

    def layers_forward(self, inputs: Any, chunk: int = 0) -> Any:
        """Outputs of a chunk."""
        return super().forward(inputs) if self.layout.chunks == 1 else super().forward(inputs, chunk=chunk)

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        """The loss of what the last layer returned; without a ``loss_fn`` the outputs themselves."""
        self.outputs = outputs if not torch.is_grad_enabled() else None
        loss_fn = self.stage_module.loss_fn
        if loss_fn is None or not self._compute_loss:
            return outputs
        precision = self.plan.precision
        if precision.autocast is None:
            loss = loss_fn(outputs, labels)
        else:
            with autocast_context(precision, self.device.type):
                loss = loss_fn(outputs, labels)
        for name, part in (self.stage_module.get_additional_losses() or {}).items():
            value = part.detach().float() if isinstance(part, Tensor) else torch.tensor(float(part))
            self._additional[name] = self._additional.get(name, torch.zeros(())) + value.cpu()
        return loss

    def weights_stage(self, action: Action) -> None:
        """The gradients of weights that a split backward has left."""
        with torch.no_grad():
            self._weights.compute((action.micro_batch, action.chunk))

    def synchronize(self) -> None:
        self.accelerator.synchronize()

    def backward_stage(self, action: Action, outputs: Any, gradients: Sequence[Tensor | None]) -> None:
        """One micro-batch; its gradients stay on this rank until the end of the batch."""
        self._weights.part = (action.micro_batch, action.chunk)
        if action == self._summed_in:
            self._require_core("train_batch").reducer.sync_enabled = True
        if self._links[action.chunk].outputs is None:
            super().backward(outputs)
            return
        core, plain = self._require_core("train_batch"), self._plain_backward
        self.events.emit("before_backward", loss=None)
        plain.paused = True
        try:
            core.reducer.before_backward()
            backward_from(outputs, gradients)
            self._end_backward()
        except BaseException as error:
            self.abandon_update(error)
            raise
        finally:
            plain.paused = False
        self.events.emit("after_backward", loss=None, share=None)

    def _count_micro_batch(self) -> None:
        if not self.clock.at_boundary:  # the last one counts with the update
            super().step()

    # Losses ---------------------------------------------------------------------------------------------------

    def _mean_loss(self, losses: list[Any]) -> Tensor:
        if not self.has_loss:
            return torch.zeros((), device=self.device)
        if not all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in losses):
            raise PipelineError("the last stage returned no scalar loss: give PipelineModule a loss_fn")
        return torch.stack([loss.float().view(()) for loss in losses]).mean()

    def _agree_on_losses(self, losses: list[Any], count: int) -> Tensor:
        """The mean over micro-batches and replicas, and those of its parts, on every rank."""
        parts = {name: value / count for name, value in sorted(self._additional.items())}
        values = [self._mean_loss(losses), torch.tensor(float(len(parts)), device=self.device)]
        values = self._from_last_stage(self._mean_over_replicas(torch.stack(values)))
        if int(values[1]):
            names = self._names_from_last_stage(list(parts))
            own = (
                [parts[name].to(self.device) for name in names]
                if parts
                else [values[0].new_zeros(())] * len(names)
            )
            means = self._from_last_stage(self._mean_over_replicas(torch.stack(own))).tolist()
            self._reports = dict(zip(names, means, strict=True))
        return values[0]

    def _mean_over_replicas(self, values: Tensor) -> Tensor:
        replicas = self.scopes.everyone
        if replicas.size > 1:
            replicas.all_reduce(values.view(-1)).wait()
            values = values / replicas.size
        return values

    def _from_last_stage(self, values: Tensor) -> Tensor:
        if self.num_stages > 1:
            values = values.contiguous()
            self.scopes.across["pp"].broadcast(values.view(-1), src=self.loss_stage).wait()
        return values

    def _names_from_last_stage(self, names: list[str]) -> list[str]:
        if self.num_stages > 1:
            message = [names]
            dist.broadcast_object_list(
                message, self.grid.pp_group[self.loss_stage], group=self.grid.get_pipe_parallel_group()
            )
            names = message[0]
        return names

    def get_additional_losses(self) -> dict[str, float] | None:
        """What ``PipelineModule.get_additional_losses`` reported in the last batch: means over micro-batches and
        replicas, by name."""
        return dict(self._reports) or None

"""A host Adam that works beside its caller: queues of tasks and results, with a rollback of the last step.

The engine itself does not use it (its speculation is part of the ZeRO core); it is for whoever schedules updates of
tensors by hand.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam


class TaskKeys:
    """Keys of a task."""

    PARAM_DATA = "param_data"
    PARAM_GRAD = "param_grad"
    PARAM_GROUP_ID = "param_group_id"
    SUB_GROUP_ID = "sub_group_id"
    ROLLBACK = "rollback"
    LR = "lr"


class ResultKeys:
    """Keys of a result, which also has ``TaskKeys.PARAM_GROUP_ID`` and ``TaskKeys.SUB_GROUP_ID``."""

    UPDATED_PARAM = "updated_param"
    EVENT_TYPE = "event_type"


class EventTypes:
    """What a result is of."""

    ADAM_STEP = "adam_step"
    ROLLBACK = "rollback"


class TaskQueue(Protocol):
    """A queue of ``queue`` or of ``multiprocessing``."""

    def get(self) -> Any: ...

    def put(self, item: Any) -> None: ...


class _SubGroup:
    """One tensor that is updated, with its optimizer and what it was before its last step."""

    def __init__(self, options: dict[str, Any], param: Tensor) -> None:
        self.param = torch.nn.Parameter(param, requires_grad=False)
        self.optimizer = DeepSpeedCPUAdam([self.param], **options)
        self.before: list[tuple[Tensor, Tensor]] = []

    def step(self, param: Tensor, grad: Tensor, lr: float | None) -> None:
        if param.data_ptr() != self.param.data_ptr():
            self.param.data = param
        group = self.optimizer.param_groups[0]
        if lr is not None:
            group["lr"] = lr
        state = self.optimizer.state_for(self.param, group)
        live = [self.param.data, *state.values()]
        self.before = [(tensor, tensor.clone()) for tensor in live]
        self.optimizer.multi_tensor_step(group, [self.param], [grad])

    def roll_back(self) -> None:
        for tensor, value in self.before:
            tensor.copy_(value)
        self.before = []


def superoffload_optimizer_worker(
    param_queue: TaskQueue, result_queue: TaskQueue, optimizer_config: dict[str, Any], max_grad_numel: int
) -> None:
    """Work on tasks (dicts with ``TaskKeys``) until one is None; each yields a result, or the exception it raised.

    Args:
        optimizer_config: arguments of ``DeepSpeedCPUAdam``, such as ``lr`` and ``betas``.
        max_grad_numel: elements of the longest gradient; ValueError for a longer one.
    """
    sub_groups: dict[tuple[int, int], _SubGroup] = {}
    while (task := param_queue.get()) is not None:
        try:
            result_queue.put(_work(sub_groups, task, optimizer_config, max_grad_numel))
        except Exception as error:
            result_queue.put(error)


@torch.no_grad()
def _work(
    sub_groups: dict[tuple[int, int], _SubGroup], task: dict[str, Any], options: dict[str, Any], longest: int
) -> dict[str, Any]:
    param, grad = task[TaskKeys.PARAM_DATA].detach(), task[TaskKeys.PARAM_GRAD]
    key = task[TaskKeys.PARAM_GROUP_ID], task[TaskKeys.SUB_GROUP_ID]
    sub_group = sub_groups.get(key)
    if task.get(TaskKeys.ROLLBACK):
        if sub_group is None or not sub_group.before:
            raise RuntimeError(f"sub-group {key[1]} of group {key[0]} has no step to roll back")
        sub_group.roll_back()
    else:
        if grad.numel() > longest:
            raise ValueError(f"a gradient of {grad.numel()} elements, but max_grad_numel is {longest}")
        if sub_group is None:
            sub_group = sub_groups[key] = _SubGroup(options, param)
        sub_group.step(param, grad, task.get(TaskKeys.LR))
    return {
        TaskKeys.PARAM_GROUP_ID: key[0],
        TaskKeys.SUB_GROUP_ID: key[1],
        ResultKeys.UPDATED_PARAM: sub_group.param.data,
        ResultKeys.EVENT_TYPE: EventTypes.ROLLBACK if task.get(TaskKeys.ROLLBACK) else EventTypes.ADAM_STEP,
    }


class SuperOffloadCPUOptimizer:
    """Updates tensors in host memory on a thread of its own, which shares their memory: nothing is copied.

    Args:
        optimizer_config: arguments of ``DeepSpeedCPUAdam``, such as ``lr`` and ``betas``.
        cpuadam_cores_perc: share of this process's threads that the update may use.
        max_grad_numel: elements of the longest gradient.
    """

    def __init__(
        self, optimizer_config: dict[str, Any], cpuadam_cores_perc: float = 0.8, max_grad_numel: int = 1000000
    ) -> None:
        self.max_grad_numel = max_grad_numel
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending = 0
        threads = max(1, int(cpuadam_cores_perc * torch.get_num_threads()))
        arguments = self._tasks, self._results, dict(optimizer_config), max_grad_numel
        self._thread = threading.Thread(target=_with_threads, args=(threads, *arguments), daemon=True)
        self._thread.start()

    def async_step(
        self,
        param_group_id: int,
        sub_group_id: int,
        fp32_param: Tensor,
        fp32_grad: Tensor,
        rollback: bool = False,
        lr: float | None = None,
    ) -> None:
        """Start to update ``fp32_param`` [n] in place, or with ``rollback`` to restore it, and the moments, to before
        its last step. RuntimeError: ``close`` was called."""
        if not self._thread.is_alive():
            raise RuntimeError("this SuperOffloadCPUOptimizer is closed")
        self._pending += 1
        self._tasks.put(
            {
                TaskKeys.PARAM_DATA: fp32_param,
                TaskKeys.PARAM_GRAD: fp32_grad,
                TaskKeys.PARAM_GROUP_ID: param_group_id,
                TaskKeys.SUB_GROUP_ID: sub_group_id,
                TaskKeys.ROLLBACK: rollback,
                TaskKeys.LR: lr,
            }
        )

    def get_result(self, expected_event_type: str | None = None) -> dict[str, Any] | None:
        """Wait for the result of the oldest task; None if there is none. Raises what the task raised; RuntimeError: it
        is not of ``expected_event_type``."""
        if not self._pending:
            return None
        self._pending -= 1
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        found = result[ResultKeys.EVENT_TYPE]
        if expected_event_type is not None and found != expected_event_type:
            raise RuntimeError(f"the next result is of {found!r}, not of {expected_event_type!r}")
        return result

    def close(self) -> None:
        """Finish all tasks and end the thread."""
        self._tasks.put(None)
        self._thread.join()


def _with_threads(threads: int, *arguments: Any) -> None:
    torch.set_num_threads(threads)
    superoffload_optimizer_worker(*arguments)

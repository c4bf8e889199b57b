"""AdamW of chosen columns: what ZenFlow updates on the device at every step, while the host updates the rest seldom.

Whoever chooses the columns puts these on a parameter before a step; a 1-D parameter is updated whole:

- ``selected_indices`` [n]: the columns (of a 2-D parameter)
- ``selected_grad`` [rows, n]: their gradient; without it a parameter is left as it is
- ``temp_selected_param`` [rows, n], if the parameter itself may be older: the columns that the step starts from

The step writes the updated columns into the parameter and takes the last two off again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw  # pyright: ignore[reportAttributeAccessIssue]  # torch.optim hides it

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZenFlowSelectiveAdamW(torch.optim.AdamW):
    """``AdamW(*args, **kwargs)`` over the selected columns of the parameters.

    With ``offload`` their moments lie in host memory between steps, as ``exp_avg_cpu_data`` and ``exp_avg_sq_cpu_data``
    of the parameter; a step brings in those of about ``bucket_size`` elements at a time.
    """

    def __init__(self, *args: Any, offload: bool = False, bucket_size: float = 5e8, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if any(group["amsgrad"] for group in self.param_groups):
            raise ValueError(
                "amsgrad=True: selected columns have no maximum of their second moments; leave it out"
            )
        self.offload = offload
        self.bucket_size = bucket_size
        # The methods that are meant are the optimizer's own: schedules and clients wrap and compare them.
        self.step = self._step_with_offload if offload else self._step_without_offload  # type: ignore[assignment]
        self.group_step = self._group_step_with_offload if offload else self._group_step_without_offload  # type: ignore[assignment]

    # Steps --------------------------------------------------------------------------------------------------

    def _step_without_offload(self, closure: None = None) -> None:
        """Updates every parameter that has a ``selected_grad``."""
        self._group_step_without_offload(self._all())

    def _step_with_offload(self, closure: None = None) -> None:
        """The same, with moments from host memory."""
        self._group_step_with_offload(self._all())

    def _group_step_without_offload(self, group_to_paramlist: Mapping[int, Sequence[Tensor]]) -> None:
        """Updates the given parameters with the settings of their groups, by number."""
        for number, params in group_to_paramlist.items():
            self._update(self.param_groups[number], _ready(params))

    def _group_step_with_offload(self, group_to_paramlist: Mapping[int, Sequence[Tensor]]) -> None:
        for number, params in group_to_paramlist.items():
            for bucket in self._buckets(_ready(params)):
                self.copy_mv_from_cpu(bucket)
                self._update(self.param_groups[number], bucket)
                self.copy_mv_to_cpu(bucket)

    def group_step(self, group_to_paramlist: Mapping[int, Sequence[Tensor]]) -> None:
        """One step of these parameters only: {number of a group: parameters of it}."""
        step = self._group_step_with_offload if self.offload else self._group_step_without_offload
        step(group_to_paramlist)

    def _all(self) -> dict[int, list[Tensor]]:
        return {number: group["params"] for number, group in enumerate(self.param_groups)}

    def _buckets(self, params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Runs of parameters, of ``bucket_size`` elements or of one parameter."""
        bucket: list[Tensor] = []
        size = 0
        for param in params:
            numel = param.selected_grad.numel()  # type: ignore[attr-defined]
            if bucket and size + numel > self.bucket_size:
                yield bucket
                bucket, size = [], 0
            bucket.append(param)
            size += numel
        if bucket:
            yield bucket

    @torch.no_grad()
    def _update(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        if not params:
            return
        columns = [_columns(param) for param in params]
        grads = [param.selected_grad.to(value.dtype) for param, value in zip(params, columns, strict=True)]  # type: ignore[attr-defined]
        states = [self._state(param, grad) for param, grad in zip(params, grads, strict=True)]
        beta1, beta2 = group["betas"]
        adamw(
            columns,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for param, value in zip(params, columns, strict=True):
            if param.dim() == 1:
                param.data.copy_(value)
            else:
                param.data[:, param.selected_indices] = value  # type: ignore[attr-defined]
            param.temp_selected_param = None  # type: ignore[attr-defined]
            param.selected_grad = None  # type: ignore[attr-defined]

    def _state(self, param: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Step and moments of a parameter's columns; fresh ones where another number of columns is selected."""
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        found = {key: getattr(param, key, None) for key in MOMENTS} if self.offload else state
        for key in MOMENTS:
            moment = found.get(key)
            if moment is None or moment.shape != grad.shape:
                moment = torch.zeros_like(grad)
            if self.offload:
                setattr(param, key, moment)
            else:
                state[key] = moment
        return {
            "step": state["step"],
            **({key: getattr(param, key) for key in MOMENTS} if self.offload else state),
        }

    # Columns and moments --------------------------------------------------------------------------------------

    def temp_copy_param(self, group_to_paramlist: Mapping[int, Iterable[Tensor]]) -> None:
        """Keeps the selected columns as ``temp_selected_param``, before something else writes to the parameters."""
        for params in group_to_paramlist.values():
            for param in params:
                param.temp_selected_param = _columns(param)  # type: ignore[attr-defined]

    def copy_mv_from_cpu(self, params: Iterable[Tensor]) -> None:
        """Moments from host memory to the parameters' devices, where there are any."""
        for param in params:
            for key in MOMENTS:
                kept = getattr(param, f"{key}_cpu_data", None)
                if kept is not None:
                    setattr(param, key, kept.to(param.device, non_blocking=True))

    def copy_mv_to_cpu(self, params: Iterable[Tensor]) -> None:
        """The other way; they leave the device."""
        for param in params:
            for key in MOMENTS:
                moment = getattr(param, key, None)
                if moment is None:
                    continue
                kept = getattr(param, f"{key}_cpu_data", None)
                if kept is None or kept.shape != moment.shape:
                    setattr(param, f"{key}_cpu_data", moment.to("cpu", copy=True))
                else:
                    kept.copy_(moment)
                setattr(param, key, None)

    def clear_selected_mv(self) -> None:
        """Zeroes all moments: other columns are selected."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param, {})
                for key in MOMENTS:
                    for moment in (state.get(key), getattr(param, f"{key}_cpu_data", None)):
                        if moment is not None:
                            moment.zero_()


def _ready(params: Iterable[Tensor]) -> list[Tensor]:
    return [param for param in params if getattr(param, "selected_grad", None) is not None]


def _columns(param: Tensor) -> Tensor:
    """A copy of the values that are updated."""
    kept = getattr(param, "temp_selected_param", None)
    if kept is not None:
        return kept.detach().clone()
    if param.dim() == 1:
        return param.detach().clone()
    return param.detach()[:, param.selected_indices].clone()  # type: ignore[attr-defined]

"""CompactAdam: Adam with 8-bit moments, and optionally with bfloat16 weights without fp32 master weights.

T. Dettmers et al.: 8-bit Optimizers via Block-wise Quantization (ICLR 2022); P. Zamirai et al.: Revisiting BFloat16
Training (2020). With both, a parameter takes 6 bytes instead of 16: 2 for the weight, which is its own master, 2 for
the moments, and 2 for the gradient.

A moment is stored as codes ``exp_avg`` (uint8) with scales ``exp_avg_scale`` (fp32, one per 256 elements);
``exp_avg_sq`` holds codes of the square root of the second moment (``ops/formats/blockwise.py``). New moments are
rounded stochastically, so that averages that change by less than one code per step still change on average; so are
bfloat16 weights with ``stochastic_rounding``. The direction is a function of the step and the element's index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam, adam_defaults
from deepspeed.ops.formats import blockwise as state_codes
from deepspeed.ops.multi_tensor import Launch, Table, fits_kernel, refuse
from deepspeed.ops.update import Group, UpdateTraits

CODES = 3
"""``enum ds_state_codes``."""
SCALE = "_scale"
"""Suffix of the name of a moment's scales."""

_CODE = {"exp_avg": state_codes.SIGNED, "exp_avg_sq": state_codes.UNSIGNED}


class _Table(Table):
    """Rows of ``struct ds_compact_segment``."""

    row_words = 10

    def _row(
        self, i: int, param: Tensor, grad: Tensor, state: dict[str, Any], low: Tensor | None
    ) -> tuple[int, Sequence[int]] | None:
        moments = [state[name] for name in _CODE]
        coded = moments[0].dtype is torch.uint8
        floats = [t for t in (param, grad, low, *(moments if not coded else ())) if t is not None]
        fits = all(fits_kernel(tensor, param.device) for tensor in floats)
        if not fits or not (coded or moments[0].dtype is torch.float32):
            return None
        scales = [state[name + SCALE].data_ptr() for name in _CODE] if coded else [0, 0]
        row = (param.data_ptr(), grad.data_ptr(), *[m.data_ptr() for m in moments], *scales)
        low_address = 0 if low is None else low.data_ptr()
        ends = (low_address, state["step"].data_ptr(), param.numel(), self.starts[i])
        return CODES if coded else 0, (*row, *ends)


class CompactAdam(MultiTensorAdam):
    """Adam with decoupled weight decay (``adam_w_mode=True``, AdamW) or with L2 regularisation.

    Args:
        state_bits: 8 (codes) or 32 (fp32) per moment.
        stochastic_rounding: round updated bfloat16 parameters stochastically, so that a weight without an fp32 master
            also accumulates updates smaller than its last digit. Parameters in fp32 are not rounded, fp16 ones are
            rounded to nearest.

    One pass over memory, on CPUs and, by a Triton kernel, on GPUs; bit-identical plain PyTorch elsewhere.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        state_bits: int = 8,
        stochastic_rounding: bool = False,
    ) -> None:
        refuse("CompactAdam", amsgrad=amsgrad)
        if state_bits not in (8, 32):
            raise ValueError(f"state_bits={state_bits!r} must be 8 or 32")
        self.state_bits = state_bits
        defaults = adam_defaults(lr, bias_correction, betas, eps, weight_decay, adam_w_mode)
        super().__init__(params, {**defaults, "stochastic_rounding": bool(stochastic_rounding)})

    @property
    def update_traits(self) -> UpdateTraits:  # type: ignore[override]  # of the instance, not of the class
        coded = tuple(_CODE) if self.state_bits == 8 else ()
        return UpdateTraits(elementwise=True, grain=state_codes.BLOCK, coded=coded, positions=True)

    kernel_name, table_class = "ds_compact_adam", _Table

    @property
    def kernel_switches(self) -> tuple[str, ...]:  # type: ignore[override]
        return *super().kernel_switches, "stochastic_rounding"

    # ---- state ---------------------------------------------------------------------------------------------

    def _names_for(self, group: Group) -> tuple[str, ...]:
        return (*_CODE, *(name + SCALE for name in _CODE)) if self.state_bits == 8 else self.state_names

    def state_for(self, param: Tensor, group: Group) -> dict[str, Any]:
        if self.state_bits == 8:
            state = self.state[param]
            for name in _CODE:
                if name not in state:
                    state[name] = torch.zeros_like(param, dtype=torch.uint8, requires_grad=False)
                    count = state_codes.blocks(param.numel())
                    state[name + SCALE] = torch.zeros(count, dtype=torch.float32, device=param.device)
        return super().state_for(param, group)

    @staticmethod
    def _state_dtype(param: Tensor, group: Group) -> torch.dtype:
        return torch.float32

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.state_bits == 8:
            for state in self.state.values():
                for name in _CODE:
                    if name in state and state[name].dtype is not torch.uint8:
                        self._restore_codes(state, name)

    def _restore_codes(self, state: dict[str, Any], name: str) -> None:
        """Restore a state tensor after loading: from codes, which loading has cast to float (whole numbers, so
        losslessly), or from values of another Adam.
        """
        loaded = state[name]
        state[name] = loaded.to(torch.uint8)
        if name + SCALE not in state:  # state of another Adam
            state[name + SCALE] = torch.zeros(state_codes.blocks(loaded.numel()), device=loaded.device)
            self.set_decoded_state(state, name, loaded)

    def decoded_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy ``state`` in other Adams' form: codes decoded to fp32 values, no scales."""
        if self.state_bits != 8 or not state:
            return state
        values = {key: value for key, value in state.items() if not key.endswith(SCALE)}
        for name, code in _CODE.items():
            decoded = state_codes.decode(code, state[name], state[name + SCALE])
            values[name] = decoded.square_() if code is state_codes.UNSIGNED else decoded
        return values

    def set_decoded_state(self, state: dict[str, Any], name: str, values: Tensor) -> None:
        """Invert ``decoded_state`` for one moment: decoded values get their codes back, others the nearest codes."""
        if name == "exp_avg_sq":
            values = _root(values.float())
        codes, scales = state_codes.encode(_CODE[name], values.float())
        state[name].copy_(codes.view(state[name].shape))
        state[name + SCALE].copy_(scales)

    # ---- step ----------------------------------------------------------------------------------------------

    def _device_update(self, launch: Launch, steps: list[int], group: Group, grad_scale: float) -> None:
        from deepspeed.ops.gpu import compact_adam  # imports Triton

        compact_adam.step(launch, steps, group, decoupled=group[self.decoupled_key], grad_scale=grad_scale)

    @torch.no_grad()
    def _update_in_torch(self, table: Table, group: Group, grad_scale: float) -> None:
        """Update tensors one by one. Reference implementation: the kernel's operations in the same order."""
        for i, step in zip(table.others, table.count_steps(table.others), strict=True):
            param, state, start = table.params[i].detach(), table.states[i], table.starts[i]
            wide, scaled, coded = param.float(), table.grads[i].float() * grad_scale, self.state_bits == 8
            moments = [
                [kept]
                for kept in (self._scaled_moments(state, group) if coded else [state[n] for n in _CODE])
            ]
            updated = [wide.clone()]
            self._torch_update(group, updated, [scaled], moments, [step], scaled_moments=coded)
            if coded:
                dither = state_codes.CODE_DITHER.dither(step, start, wide)
                new = (moments[0][0], _root(moments[1][0]))
                for (name, code), value in zip(_CODE.items(), new, strict=True):
                    codes, scales = state_codes.encode(code, value, dither)
                    state[name].copy_(codes)
                    state[name + SCALE].copy_(scales)
            result = updated[0]
            if group["stochastic_rounding"] and param.dtype is torch.bfloat16:
                result = state_codes.round_stochastically(
                    result, state_codes.PARAM_DITHER.dither(step, start, wide)
                )
            param.copy_(result)
            low = None if table.low_precision is None else table.low_precision[i]
            if low is not None:
                low.copy_(updated[0].view(low.shape))

    @staticmethod
    def _scaled_moments(state: dict[str, Any], group: Group) -> list[Tensor]:
        """Return both moments, multiplied by their betas."""
        factors = (group["betas"][0], math.sqrt(group["betas"][1]))
        first, root = (
            state_codes.decode_scaled(code, state[name], state[name + SCALE], by)
            for (name, code), by in zip(_CODE.items(), factors, strict=True)
        )
        return [first, root.square_()]


def _root(values: Tensor) -> Tensor:
    """Return the square root, correctly rounded on every device."""
    return values.double().sqrt_().float()

"""One call of an op over lists of tensors."""

from __future__ import annotations

from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply as MultiTensorApply

"""Fake quantization in groups."""

from __future__ import annotations

from deepspeed.ops.quantizer.quantizer import ds_quantizer as ds_quantizer

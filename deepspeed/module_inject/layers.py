"""Documented path of the parallel layers."""

from __future__ import annotations

from deepspeed.runtime.tensor_parallel.layers import LinearAllreduce, LinearLayer

__all__ = ["LinearAllreduce", "LinearLayer"]

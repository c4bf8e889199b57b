"""Replaying the forwards of single tokens as CUDA graphs, for decoding loops of one's own.

A graph does what was done when it was captured, in the same memory. A forward whose tensors grow or move from token to
token therefore needs a graph for each position, and a cache that stays where it is. (``DeepSpeedHybridEngine.generate``
uses none.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import logger

__all__ = ["DecodeGraphCache", "decode_steps_from_generate_kwargs", "validate_cuda_graph_support"]


class DecodeGraphCache:
    """Stands for ``forward``: calls with one token per row replay the graph of their position.

    A sequence is computed either by graphs or without any: ``begin_sequence`` decides. What cannot be captured is
    computed by ``forward`` itself from then on.

    Args:
        forward: takes ``input_ids`` [rows, tokens] and other tensors by keyword.
        max_positions: graphs that are kept at most.
    """

    def __init__(self, forward: Callable[..., Any], max_positions: int) -> None:
        self._forward = forward
        self._max_positions = max_positions
        self._graphs: dict[int, Any] = {}
        self._static_kwargs: dict[int, dict[str, Tensor]] = {}
        """What the graph of a position reads."""
        self._static_outputs: dict[int, Any] = {}
        self._length: int | None = None
        """Of the sequences that the graphs are for."""
        self._position = 0
        self._replays = False
        self._works = True

    @property
    def captured_positions(self) -> int:
        """Graphs that there are."""
        return len(self._graphs)

    def invalidate(self) -> None:
        """Forget all graphs."""
        for kept in (self._graphs, self._static_kwargs, self._static_outputs):
            kept.clear()
        self._length = None

    def begin_sequence(self, num_decode_steps: int | None) -> None:
        """The next sequence has so many calls with one token; None: nobody knows, so that it uses no graphs. Another
        number than before makes the graphs useless."""
        self._position = 0
        fits = num_decode_steps is not None and 0 < num_decode_steps <= self._max_positions
        self._replays = self._works and fits
        if not self._replays:
            return
        if self._length not in (None, num_decode_steps):
            self.invalidate()
        self._length = num_decode_steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """RuntimeError: the sequence is longer than it was said to be."""
        tokens = kwargs.get("input_ids")
        if not self._replays or tokens is None or tokens.dim() != 2 or tokens.shape[1] != 1:
            return self._forward(*args, **kwargs)
        position, self._position = self._position, self._position + 1
        if self._length is not None and position >= self._length:
            raise RuntimeError(
                f"token {position + 1} of a sequence that was begun with {self._length} steps: give begin_sequence() "
                "the number of calls with one token"
            )
        given = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        try:
            if position not in self._graphs:
                self._capture(position, given, args, kwargs)
            self._refresh(position, given)
        except Exception as error:
            if position:
                raise  # earlier tokens of this sequence are in what graphs have written
            logger.warning(f"decoding goes on without graphs: {error}")
            self.invalidate()
            self._works = self._replays = False
            return self._forward(*args, **kwargs)
        get_accelerator().replay_graph(self._graphs[position])
        return self._static_outputs[position]

    def _capture(
        self, position: int, given: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        accelerator = get_accelerator()
        graph = accelerator.create_graph()
        if graph is None:
            raise RuntimeError(f"{accelerator.device_name()} captures no graphs")
        static = {name: value.clone() for name, value in given.items()}
        first = next(iter(self._graphs.values()), None)
        with accelerator.capture_to_graph(graph, pool=None if first is None else first.pool()):
            output = self._forward(*args, **{**kwargs, **static})
        self._graphs[position], self._static_kwargs[position] = graph, static
        self._static_outputs[position] = output

    def _refresh(self, position: int, given: Mapping[str, Tensor]) -> None:
        static = self._static_kwargs[position]
        shapes = [{name: each.shape for name, each in some.items()} for some in (static, given)]
        if shapes[0] != shapes[1]:
            raise RuntimeError(f"tensors of other shapes: {shapes[1]}, captured were {shapes[0]}")
        with torch.no_grad():
            for name, value in given.items():
                static[name].copy_(value)


def decode_steps_from_generate_kwargs(kwargs: Mapping[str, Any]) -> int | None:
    """How many forwards of one token ``generate(**kwargs)`` makes (the first new token comes from the prompt's
    forward); None: that depends on what is drawn."""
    most, least = kwargs.get("max_new_tokens"), kwargs.get("min_new_tokens")
    return int(most) - 1 if most is not None and most == least else None


def validate_cuda_graph_support(config: Any, zero_stage: int) -> str | None:
    """Why decoding cannot be captured with this ``hybrid_engine`` section at this stage of ZeRO; None: it can."""
    if zero_stage == 3:
        return "ZeRO stage 3 gathers weights into new memory for each generation, where graphs would not look"
    if config.release_inference_cache:
        return "release_inference_cache gives back the memory that graphs write to"
    if config.inference_tp_size > 1:
        return f"inference_tp_size={config.inference_tp_size}: graphs do not communicate between ranks"
    device = get_accelerator().device_name()
    return None if device == "cuda" else f"graphs are captured on CUDA devices, not on {device}"

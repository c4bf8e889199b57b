"""The whole pipeline as one model on the meta device, from which a stage learns what it must know of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.specs import Layer, LayerSpec, TiedLayerSpec, shape_of
from deepspeed.zero.meta import meta_copy

_BATCH, _LENGTH = 2, 5  # of guessed inputs


def as_meta(value: Any) -> Any:
    """Move the tensors of a nest to the meta device."""
    return tree_map(lambda each: each.to("meta") if isinstance(each, Tensor) else each, value)


class MetaModel(nn.ModuleList):
    """The layers in sequence, under their names in a PipelineModule.

    A list, so that an analysis may delete all but one of identical layers; forward runs the remaining ones.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.order: list[tuple[str, Callable[..., Any] | None]] = []
        """(path of a module, function that calls it or None), or (empty path, function)."""
        ties = nn.ModuleDict()
        for index, layer in enumerate(layers):
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in ties:
                    ties[layer.key] = meta_copy(shape_of(layer))
                self.order.append((f"tied_modules.{layer.key}", layer.forward_fn))
                continue
            module = shape_of(layer) if isinstance(layer, LayerSpec) else layer
            if isinstance(module, nn.Module):
                self.add_module(str(index), meta_copy(module))
                self.order.append((str(index), None))
            else:
                self.order.append(("", module))
        if len(ties):
            self.add_module("tied_modules", ties)

    def forward(self, forward_input: Any) -> Any:
        for path, function in self.order:
            if path and path.partition(".")[0] not in self._modules:
                continue  # deleted: an identical layer represents it
            module = self.get_submodule(path) if path else None
            if module is None:
                assert function is not None
                forward_input = function(forward_input)
            else:
                forward_input = module(forward_input) if function is None else function(module, forward_input)
        return forward_input

    def example(self, given: Any = None) -> Any:
        """Return an input of the first layer on the meta device: ``given`` unless None, otherwise one that the model
        accepts: token ids, or vectors as wide as its first weight.

        PipelineError: nothing was given, and the model accepts neither.
        """
        if given is not None:
            return given
        failures = []
        for guess in self._guesses():
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a wrong guess may warn
                    self(guess)
            except Exception as error:  # any error means a wrong guess
                failures.append(f"{list(guess.shape)} of {guess.dtype}: {type(error).__name__}: {error}")
            else:
                return guess
        raise PipelineError(
            "the input of the first pipeline layer is unknown, but tensor_parallel.autotp_size needs it: pass an "
            f"example as PipelineModule(profile_input=...). Tried: {'; '.join(failures) or 'nothing'}"
        )

    def _guesses(self) -> Iterator[Tensor]:
        first = next((param for param in self.parameters() if param.ndim > 1), None)
        if any(isinstance(each, nn.Embedding) for each in self.modules()):
            yield torch.zeros(_BATCH, _LENGTH, dtype=torch.int64, device="meta")
        if first is not None:
            yield torch.zeros(_BATCH, _LENGTH, first.shape[1], device="meta")
            yield torch.zeros(_BATCH, first.shape[1], device="meta")

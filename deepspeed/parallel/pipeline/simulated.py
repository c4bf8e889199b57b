"""All layers of a pipeline as one model without memory: what a stage must know of the others is read off it."""

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

_BATCH, _LENGTH = 2, 5  # of inputs that are made up


def as_meta(value: Any) -> Any:
    """The tensors of a nest without values."""
    return tree_map(lambda each: each.to("meta") if isinstance(each, Tensor) else each, value)


class MetaModel(nn.ModuleList):
    """Layers one after the other, under the names that they have in a PipelineModule.

    A list, so that those who look at it may leave out all but one of the layers that are alike: what is left is called.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.order: list[tuple[str, Callable[..., Any] | None]] = []
        """Path of a module, and what calls it if not itself; or an empty path and a function."""
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
                continue  # another layer stands for it
            module = self.get_submodule(path) if path else None
            if module is None:
                assert function is not None
                forward_input = function(forward_input)
            else:
                forward_input = module(forward_input) if function is None else function(module, forward_input)
        return forward_input

    def example(self, given: Any = None) -> Any:
        """Return an input of the first layer on the meta device: ``given`` unless None, otherwise one that the model
        accepts: tokens, or vectors as wide as its first weight.

        PipelineError: nothing was given, and it accepts neither.
        """
        if given is not None:
            return given
        failures = []
        for guess in self._guesses():
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it is a guess
                    self(guess)
            except Exception as error:  # whatever the layers raise: it is not what they take
                failures.append(f"{list(guess.shape)} of {guess.dtype}: {type(error).__name__}: {error}")
            else:
                return guess
        raise PipelineError(
            "what the first layer of the pipeline takes is not known, but tensor_parallel.autotp_size needs it: "
            f"give an example as PipelineModule(profile_input=...). Tried: {'; '.join(failures) or 'nothing'}"
        )

    def _guesses(self) -> Iterator[Tensor]:
        first = next((param for param in self.parameters() if param.ndim > 1), None)
        if any(isinstance(each, nn.Embedding) for each in self.modules()):
            yield torch.zeros(_BATCH, _LENGTH, dtype=torch.int64, device="meta")
        if first is not None:
            yield torch.zeros(_BATCH, _LENGTH, first.shape[1], device="meta")
            yield torch.zeros(_BATCH, first.shape[1], device="meta")

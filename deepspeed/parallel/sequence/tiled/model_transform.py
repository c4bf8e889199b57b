"""``tiled_compute`` for an unmodified model: finds feed-forward layers and the output layer by their structure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed.base.sharded import full_shape
from deepspeed.config.sections.model import TiledComputeConfig
from deepspeed.parallel.sequence.tiled.attention_chunks import NotChunkable, attention_modules, chunked
from deepspeed.parallel.sequence.tiled.functions import TiledMLP
from deepspeed.parallel.sequence.tiled.lazy_logits import LazyHead


class _ContextNotes(Protocol):
    """The part of a ``TransformContext`` that this transform uses."""

    def report(self, text: str) -> None: ...


class TiledForward:
    """Replacement ``forward`` of a feed-forward layer in ``shards`` tiles; None: tiles of at most ``hidden`` tokens."""

    def __init__(self, module: nn.Module, hidden: int, shards: int | None) -> None:
        self.module = module
        self.hidden = hidden
        self.shards = shards

    def __call__(self, x: Tensor) -> Tensor:
        length = x.shape[-2] if x.dim() > 1 else 1
        shards = self.shards or math.ceil(length / self.hidden)
        if min(shards, length) < 2:
            return type(self.module).forward(self.module, x)
        return TiledMLP.apply(_untiled, self.module, x, shards)


def _untiled(self: nn.Module, x: Tensor) -> Tensor:
    return type(self).forward(self, x)


class TiledModel:
    """The transform of the ``tiled_compute`` section."""

    name = "tiled_compute"
    after = ("tensor_parallel", "sequence_parallel", "compression", "quantized_linear", "lora")
    before = ()

    def __init__(self, section: TiledComputeConfig) -> None:
        self.section = section

    def apply(self, module: nn.Module, context: _ContextNotes) -> None:
        """Tile what the section asks for. ValueError: the model has nothing to tile; the message says why."""
        if self.section.mlp:
            self._tile_layers(module, context)
        if self.section.loss:
            self._tile_loss(module, context)
        if self.section.attention_chunk:
            _chunk_attention(module, self.section.attention_chunk, context)

    def _tile_layers(self, module: nn.Module, context: _ContextNotes) -> None:
        tiled: dict[str, int] = {}
        refused: dict[str, str] = {}
        for path, layer, hidden in _feed_forward(module):
            kind = type(layer).__name__
            try:
                if "forward" in vars(layer):
                    raise NotPerToken("its forward has already been replaced")
                check_per_token(layer, hidden)
            except NotPerToken as reason:
                refused.setdefault(kind, f"{kind} ({path}): {reason}")
                continue
            vars(layer)["forward"] = TiledForward(layer, hidden, self.section.mlp_shards)
            tiled[kind] = tiled.get(kind, 0) + 1
        if not tiled:
            why = "; ".join(refused.values()) or "the model has none"
            raise ValueError(
                f"tiled_compute.mlp is true, but no feed-forward layer can be tiled: {why}. Set tiled_compute.mlp to "
                "false, or call TiledMLP in the model"
            )
        context.report(", ".join(f"{count} {kind} in tiles" for kind, count in tiled.items()))
        for reason in refused.values():
            context.report(f"not tiled: {reason}")

    def _tile_loss(self, module: nn.Module, context: _ContextNotes) -> None:
        path, head = _output_layer(module)
        if head is None:
            raise ValueError(
                f"tiled_compute.loss is true, but {path}. Set tiled_compute.loss to false, or call "
                "TiledFusedLogitsLoss in the model"
            )
        vars(head)["forward"] = LazyHead(head, self.section.loss_shards)
        context.report(f"logits of {path} computed in tiles by the loss")


def _chunk_attention(module: nn.Module, chunk: int, context: _ContextNotes) -> None:
    count, proven = 0, set[Any]()
    refused: dict[str, str] = {}
    for path, attention in attention_modules(module):
        kind = type(attention).__name__
        try:
            vars(attention)["forward"] = chunked(attention, chunk, proven)
            count += 1
        except NotChunkable as reason:
            refused.setdefault(kind, f"{kind} ({path}): {reason}")
    if not count:
        why = "; ".join(refused.values()) or "no module has q_proj, k_proj, v_proj and o_proj"
        raise ValueError(
            f"tiled_compute.attention_chunk={chunk}, but no attention can be computed in chunks: {why}. Set "
            "tiled_compute.attention_chunk to null, or use FPDT_Attention in the model"
        )
    context.report(f"{count} attention modules in chunks of {chunk} tokens")
    for reason in refused.values():
        context.report(f"not in chunks: {reason}")


def _feed_forward(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield (path, module, hidden size) of modules whose linear layers map a width to another and back."""
    for path, each in module.named_modules():
        linears = [shape for child in each.children() if (shape := linear_shape(child)) is not None]
        for hidden, wide in linears:
            if hidden != wide and any(shape[1] == hidden and shape[0] != hidden for shape in linears):
                yield path, each, hidden
                break


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a linear layer: torch's, or Transformers' ``Conv1D`` with its weight [in, out]; else None."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor):
        rows, columns = full_shape(weight)
        return rows, columns
    return None


def _output_layer(module: nn.Module) -> tuple[str, nn.Module | None]:
    """Return (path, output layer) of a Transformers model, or (the reason why there is none, None)."""
    inner: Any = getattr(module, "get_base_model", lambda: module)()
    getter = getattr(inner, "get_output_embeddings", None)
    head = getter() if getter is not None else None
    if head is None:
        return f"{type(inner).__name__} has no output layer (get_output_embeddings)", None
    path = next((path for path, each in module.named_modules() if each is head), type(head).__name__)
    if type(head) is not nn.Linear or "forward" in vars(head):
        return f"its output layer {path} is a {type(head).__name__}, not a plain nn.Linear", None
    return path, head


# Test whether a module treats every token independently, by running it on meta tensors.


TOKENS = 7919  # a prime, so that no other dimension has this length

PRODUCTS = frozenset({"mm", "addmm", "linear", "bmm"})
VIEWS = frozenset(
    "view _unsafe_view reshape t transpose detach alias clone _to_copy split split_with_sizes chunk slice contiguous "
    "unsqueeze squeeze expand native_dropout bernoulli_ select".split()
)


class NotPerToken(ValueError):
    """A tile of the result depends, or may depend, on other tokens; the message says by which operation."""


class _TokenWatch(TorchDispatchMode):
    """Refuses operations that may mix tokens, and results whose second-to-last dim is not the tokens."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.pointwise not in func.tags and name not in PRODUCTS | VIEWS:
            raise NotPerToken(f"it uses {name}")
        if name in PRODUCTS and sum(TOKENS in tensor.shape for tensor in _tensors(args)) > 1:
            raise NotPerToken("it multiplies tokens by tokens")
        for tensor in _tensors(result):
            if TOKENS in tensor.shape and tensor.shape[-2:-1] != (TOKENS,):
                raise NotPerToken(f"{name} moves tokens to another dimension")
            if TOKENS not in tensor.shape and any(TOKENS in each.shape for each in _tensors(args)):
                raise NotPerToken(f"{name} takes some tokens apart from others")
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def check_per_token(module: nn.Module, hidden: int) -> None:
    """Raise NotPerToken unless ``module`` maps [1, tokens, hidden] to [1, tokens, ...] token by token."""
    tensors = {
        name: torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    dtype = next(iter(tensors.values())).dtype
    try:
        x = torch.empty(1, TOKENS, hidden, dtype=dtype, device="meta")
        with torch.no_grad(), _TokenWatch():
            result = torch.func.functional_call(module, tensors, (x,))
    except NotPerToken:
        raise
    except Exception as error:
        raise NotPerToken(f"its forward on hidden states alone fails: {error}") from error
    if not isinstance(result, Tensor):
        raise NotPerToken(f"it returns {type(result).__name__}, not one tensor")
    if result.shape[:2] != (1, TOKENS):
        raise NotPerToken(f"it returns shape {tuple(result.shape)} for tokens [1, {TOKENS}]")

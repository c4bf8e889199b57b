"""Random layerwise token dropping: a layer that processes a random subset of tokens (Yao et al.: Random-LTD, 2022)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.logging import warning_once
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.data.data_routing.scheduler import RandomLTDScheduler
from deepspeed.ops.random_ltd.dropping_utils import GatherTokens, ScatterTokens, square_at

LAYER = "random_ltd_layer"
_HIDDEN = "hidden_states"


class RandomLayerTokenDrop(nn.Module):
    """Replaces ``layer``. In training, the layer gets only the kept tokens, with their masks and positions, and its
    results are scattered back among the other tokens; in evaluation it gets all.

    Names of modules, parameters, attributes and state-dict entries are the same as without this wrapper. State dicts
    with the wrapper in their names load as well.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.random_ltd_layer = layer
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        """Drops tokens if set."""
        self.random_ltd_layer_id = 0
        """Index among the layers that drop tokens."""
        self.claimed = False
        """Whether an engine with the section ``random_ltd`` has decided whether this layer drops tokens."""
        self.batch_first = True
        self.reserved_length = self.curr_seq = self.curr_micro_batch = -1
        self._names = _positional(layer)
        self._cache_number = next(
            (each.layer_idx for each in layer.modules() if isinstance(getattr(each, "layer_idx", None), int)),
            0,
        )
        self.train(layer.training)
        self.register_load_state_dict_post_hook(_shorten_missing)

    def init_config(
        self, config: Mapping[str, Any], scheduler: RandomLTDScheduler, random_ltd_layer_id: int
    ) -> None:
        """Drop tokens from now on.

        Args:
            config: the section ``random_ltd``.
            scheduler: determines how many tokens are kept; shared by all layers.
            random_ltd_layer_id: index among the layers that drop tokens, from 0.

        DeepSpeedConfigError: the layer has no argument ``model_mask_name``, or an invalid ``hidden_state_order`` or
        ``model_type``.
        """
        _check_choice(config, "hidden_state_order", ("batch_seq_dim", "seq_batch_dim"))
        _check_choice(config, "model_type", ("encoder", "decoder"))
        mask = config["model_mask_name"]
        parameters = inspect.signature(self.random_ltd_layer.forward).parameters
        anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        if mask is not None and mask not in parameters and not anything:
            raise DeepSpeedConfigError(
                f"random_ltd.model_mask_name={mask!r} is not an argument of "
                f"{type(self.random_ltd_layer).__name__}, which takes {', '.join(parameters)}: set it to "
                "that of the attention mask, or null if there is none"
            )
        self.batch_first = config["hidden_state_order"] == "batch_seq_dim"
        self.random_ltd_scheduler = scheduler
        self.random_ltd_layer_id = random_ltd_layer_id

    def get_bsh(self, hidden_stats: Tensor) -> None:
        """Record the sizes of activations [batch, tokens, hidden]."""
        self.curr_micro_batch, self.curr_seq = hidden_stats.shape[:2]

    def get_sbh(self, hidden_stats: Tensor) -> None:
        """Record the sizes of activations [tokens, batch, hidden]."""
        self.curr_seq, self.curr_micro_batch = hidden_stats.shape[:2]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the kept tokens and return its result, with the activations (first of a tuple) scattered
        back."""
        scheduler = self.random_ltd_scheduler
        if scheduler is None or not self.training:
            if self.training and not self.claimed:
                self._log_no_drop()
            return self.random_ltd_layer(*args, **kwargs)
        name = self._names[0] if self._names else _HIDDEN
        hidden = args[0] if args else kwargs[name]
        (self.get_bsh if self.batch_first else self.get_sbh)(hidden)
        self.reserved_length = scheduler.get_current_seq()
        if self.reserved_length >= self.curr_seq:
            return self.random_ltd_layer(*args, **kwargs)
        named = dict(zip(self._names, args, strict=False)) | kwargs
        named.pop(name, None)
        kept = self._kept(hidden, named)
        hidden, part = GatherTokens.apply(hidden, kept.indices, self.batch_first)  # type: ignore[misc]
        others = {key: kept.of(key, value) for key, value in kwargs.items() if key != name}
        if args:
            rest = [kept.of(key, value) for key, value in zip(self._names[1:], args[1:], strict=False)]
            results = self.random_ltd_layer(part, *rest, *args[len(rest) + 1 :], **others)
        else:
            results = self.random_ltd_layer(**{name: part}, **others)
        return self._joined(hidden, results, kept.indices)

    def _log_no_drop(self) -> None:
        self.claimed = True
        warning_once(
            f"random-LTD: converted layers of class {type(self.random_ltd_layer).__name__} drop no tokens, "
            "because they belong to no engine: set data_efficiency.data_routing.random_ltd.enabled in the "
            "config, and call convert_to_random_ltd(engine, LayerClass)"
        )

    def _kept(self, hidden: Tensor, named: Mapping[str, Any]) -> KeptTokens:
        """Choose the tokens to keep in this forward."""
        assert self.random_ltd_scheduler is not None
        self._check_cache(named)
        batch = Batch(self.curr_micro_batch, self.curr_seq, self.batch_first)
        shared = has_common_tokens(batch, named)
        indices = self.random_ltd_scheduler.sampler.draw(
            self.random_ltd_layer_id, self.reserved_length, batch.length, batch.sequences, hidden.device
        )
        return KeptTokens(batch, indices[:1].expand_as(indices) if shared else indices, shared)

    def _check_cache(self, named: Mapping[str, Any]) -> None:
        cache = named.get("past_key_values")
        length = getattr(cache, "get_seq_length", None)
        if length is not None and int(length(self._cache_number)) > 0:
            raise ValueError(
                "random-LTD: past_key_values holds earlier tokens (as with prefix tuning), whose columns of the mask "
                "dropped tokens would move: train without them, or set random_ltd.enabled to false"
            )

    def _joined(self, hidden: Tensor, results: Any, indices: Tensor) -> Any:
        first = results[0] if isinstance(results, (tuple, list)) else results
        if not isinstance(first, Tensor):
            raise ValueError(
                f"random-LTD: {type(self.random_ltd_layer).__name__} returns {type(results).__name__}; it "
                "must return its activations, or a tuple starting with them"
            )
        whole = ScatterTokens.apply(hidden, first, indices, self.batch_first)
        return type(results)((whole, *results[1:])) if isinstance(results, (tuple, list)) else whole

    # The same names as without the wrapper ------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = self.__dict__.get("_modules", {}).get(LAYER)
            if layer is None or name.startswith("__"):
                raise
            return getattr(layer, name)

    def named_modules(  # type: ignore[override]
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.random_ltd_layer.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.random_ltd_layer.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load entries named without the wrapper, by adding it to their names."""
        below = f"{prefix}{LAYER}."
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(below)]:
            state_dict[below + key.removeprefix(prefix)] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _shorten_missing(module: nn.Module, keys: Any) -> None:
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [name.replace(f".{LAYER}.", ".").removeprefix(f"{LAYER}.") for name in names]


def _positional(layer: nn.Module) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(layer.forward).parameters.values()
    return [each.name for each in parameters if each.kind in named]


def _check_choice(config: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> None:
    if config[key] not in choices:
        raise DeepSpeedConfigError(f"random_ltd.{key}={config[key]!r}: must be {' or '.join(choices)}")


# Per-token arguments of a layer: masks, positions, their embeddings. The layer gets the entries of the tokens that it
# keeps.
#
# An argument is classified by its name and shape. With B sequences of S tokens:
#
#     [B or 1, S, ...], [B or 1, 1, S, ...], [axes, B, S, ...]   one entry per token of each sequence
#     [B or 1, ..., S or 1, S], called mask or bias, or bool     one per pair of tokens, or per attended token
#     [S, ...], [S, S] called mask or bias                       one per token, for all sequences together
#
# If an argument has no batch dimension, all sequences of the batch keep the same tokens: then no argument changes its
# number of dimensions, and everything in the layer still broadcasts.

_PAIRS = ("mask", "bias", "alibi")
_PADDING_MASKS = ("attention_mask", "padding")
"""Names of masks [B, S], for shapes that would fit [S, S] as well."""
_CACHES = ("past_key_values", "past_key_value", "layer_past", "use_cache", "cache_params")
_PACKED = ("cu_seq_lens", "cu_seqlens", "seq_idx")
_OTHER_SEQUENCES = ("encoder_", "cross_")
"""Prefixes of arguments about other sequences."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Layout of tokens in a tensor. ``batch``: the batch dim; None: none. ``tokens``: the token dims. ``pairs``: the
    last two dims are (queries, keys)."""

    batch: int | None
    tokens: tuple[int, ...]
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """``sequences`` of ``length`` tokens."""

    sequences: int
    length: int
    batch_first: bool

    def layout(self, name: str, tensor: Tensor) -> TokenLayout | None:
        """Return the layout of an argument; None: it is not per token."""
        shape = tuple(tensor.shape)
        if self.length not in shape or name.startswith(_OTHER_SEQUENCES):
            return None
        paired = any(word in name for word in _PAIRS) or tensor.dtype == torch.bool
        if len(shape) == 1:
            return TokenLayout(None, (0,))
        if len(shape) == 2:
            return self._flat(name, shape, paired)
        return self._paired(shape) if paired else self._entries(name, shape)

    def _flat(self, name: str, shape: tuple[int, ...], paired: bool) -> TokenLayout | None:
        per_sequence = shape[0] in (1, self.sequences) and shape[1] == self.length
        is_padding_mask = self.sequences == self.length and any(word in name for word in _PADDING_MASKS)
        if shape == (self.length, self.length) and paired and not is_padding_mask:
            return TokenLayout(None, (0, 1))
        if not self.batch_first and shape[0] == self.length and shape[1] in (1, self.sequences):
            return TokenLayout(1, (0,))
        if per_sequence:
            return TokenLayout(0, (1,))
        return TokenLayout(None, (0,)) if shape[0] == self.length else None

    def _paired(self, shape: tuple[int, ...]) -> TokenLayout | None:
        if shape[-1] != self.length or shape[-2] not in (1, self.length):
            return None
        heads = len(shape) == 3 and shape[0] % self.sequences == 0
        return TokenLayout(0, (-2, -1), pairs=True) if heads or shape[0] in (1, self.sequences) else None

    def _entries(self, name: str, shape: tuple[int, ...]) -> TokenLayout | None:
        batches = (1, self.sequences)
        if not self.batch_first and shape[0] == self.length and shape[1] in batches:
            return TokenLayout(1, (0,))
        axes = "position" in name and shape[0] == 3 and shape[1] in batches and shape[2] == self.length
        if not axes and shape[0] in batches:
            for dim in (1, 2):
                if shape[dim] == self.length:
                    return TokenLayout(0, (dim,))
        if shape[1] in batches and shape[2] == self.length:
            return TokenLayout(1, (2,))
        return TokenLayout(None, (0,)) if shape[0] == self.length else None


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Selects, in arguments of a layer, the tokens at ``indices`` [B, kept]. ``shared``: the indices are the same in
    all rows."""

    batch: Batch
    indices: Tensor
    shared: bool

    def of(self, name: str, value: Any) -> Any:
        """Return ``value`` for the kept tokens.

        ValueError: it cannot be reduced to fewer tokens.
        """
        if name in _CACHES:
            return None if name != "use_cache" else False
        if value is not None and name.startswith(_PACKED):
            raise ValueError(
                f"random-LTD: {name} packs several sequences into one row, and dropping tokens would shift "
                "the boundaries: train without packing, or take this layer out of random_ltd_layer_id"
            )
        if type(value).__name__ == "BlockMask":
            raise ValueError(
                f"random-LTD: {name} is a BlockMask of flex_attention, which cannot be cut to a subset of "
                "tokens: load the model with attn_implementation='sdpa'"
            )
        return _mapped(name, value, self._tensor)

    def _tensor(self, name: str, tensor: Tensor) -> Tensor:
        layout = self.batch.layout(name, tensor)
        if layout is None:
            return tensor
        if self.shared:
            for dim in layout.tokens:
                if tensor.shape[dim] > 1:
                    tensor = tensor.index_select(dim, self.indices[0])
            return tensor
        if layout.batch is None:  # the positions of a cache: those of each row
            return tensor[self.indices]
        if layout.pairs:
            return self._pairs(tensor)
        (dim,) = layout.tokens
        sizes = list(tensor.shape)
        sizes[layout.batch] = self.batch.sequences
        shape = [1] * tensor.dim()
        shape[dim] = -1
        shape[layout.batch] = self.batch.sequences
        indices = self.indices if layout.batch < dim else self.indices.t()
        return tensor.expand(sizes).take_along_dim(indices.reshape(shape), dim)

    def _pairs(self, tensor: Tensor) -> Tensor:
        if tensor.dim() > 3 or tensor.shape[0] in (1, self.batch.sequences):
            return square_at(tensor, self.indices)
        by_sequence = tensor.unflatten(0, (self.batch.sequences, -1))  # [sequences * heads, ...]
        return square_at(by_sequence, self.indices).flatten(0, 1)


def has_common_tokens(batch: Batch, arguments: Mapping[str, Any]) -> bool:
    """Return whether an argument has tokens but no batch dimension, so that all sequences must keep the same tokens."""
    return any(
        name != "cache_position"
        and (layout := batch.layout(name, tensor)) is not None
        and layout.batch is None
        for key, value in arguments.items()
        for name, tensor in _tensors(key, value)
    )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(name, entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(name, entry)


def _mapped(name: str, value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(name, value)
    if type(value) is dict:
        return {key: _mapped(name, entry, change) for key, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(name, entry, change) for entry in value)
    return value

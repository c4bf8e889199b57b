"""Attention of Transformers models over sequence shards (Ulysses, plus a ring if there are fewer heads than ranks).

S. A. Jacobs et al.: DeepSpeed Ulysses: System optimizations for enabling training of extreme long sequence Transformer
models, 2023; for the ring see ``deepspeed.parallel.sequence.ring``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import communicator_of
from deepspeed.parallel.sequence.assignment import HeadAssignment
from deepspeed.parallel.sequence.exchange import HeadExchange
from deepspeed.parallel.sequence.hf import parallel_state_sp
from deepspeed.parallel.sequence.hf.masks import DeferredMask, SequenceMetadata, gather_sequence
from deepspeed.parallel.sequence.hf.registration import AttentionTarget, attention_function, register
from deepspeed.parallel.sequence.ring import Ring, ring_attention
from deepspeed.parallel.sequence.visibility import Visibility

_REFUSED = ("position_bias", "s_aux", "cache", "layer_head_mask", "head_mask")
"""Arguments per head, or for a cache: shards would get the wrong part of them."""


class UlyssesSPAttentionHF(nn.Module):
    """Sequence-parallel attention with Transformers' interface: [batch, heads, own tokens, head size] -> ([batch, own
    tokens, heads, head size], None).

    Two all-to-alls surround ``attn``, the local attention (an entry of ``ALL_ATTENTION_FUNCTIONS``), which sees all
    tokens and this rank's heads. Any number of query and key heads works with any number of ranks: with fewer heads
    than ranks, head_groups of ranks split the heads and pass keys and values on in a ring. Shards may have different
    lengths. Packed documents (position ids), padding and sliding windows refer to the whole sequence.

    Args:
        attn: the local attention.
        batch_size, attn_head_size, num_hidden_layers, global_seq_length: accepted for compatibility; read from tensors.
        attn_head_count, kv_head_count: of the model; a layer with other counts uses its own.
        process_group: the ranks that share a sequence, in its order.
        seq_length_is_variable: False means that all shards always have the same length, which saves exchanging it.
        local_seq_length: that length; checked if given and not variable.
        disable_in_eval: in evaluation mode every rank gets whole sequences and calls ``attn`` directly.
    """

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: Any,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        self.attn = attn
        self.process_group = process_group
        self.plan = HeadAssignment(attn_head_count, kv_head_count, communicator_of(process_group).size)
        self.equal_lengths = not seq_length_is_variable
        self.local_seq_length = None if seq_length_is_variable else local_seq_length
        self.disable_in_eval = disable_in_eval
        self._model: weakref.ref[nn.Module] | None = None
        self.calls = 0
        """Number of calls on shards: if 0 after a forward, the model computes attention elsewhere."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Register this attention with Transformers as "ulysses", and set it on the model.

        Args:
            model_name_or_path: a model, or the name of one to be loaded later with
                ``attn_implementation="ulysses"``.
            core_attn_implementation: the local attention: "sdpa", "flash_attention_2" and so on; None: the
                model's own.
            sequence_parallel_size: number of consecutive ranks that share a sequence.
            micro_batch_size: sequences per micro-batch.
            seq_length, max_length: tokens of a whole sequence, needed if not variable.
            seq_length_is_variable, disable_in_eval: as for the constructor.

        Returns:
            The mpu for ``initialize(mpu=...)``, ``deepspeed.parallel.sequence.hf.parallel_state_sp``. None if
            ``sequence_parallel_size`` is 1; nothing is registered then.

        Raises:
            ValueError: the model's attention differs from ``core_attn_implementation`` or needs whole masks (eager);
                some layers are no attention; or the sizes are incompatible. A model that never calls the registered
                attention is refused in its first forward.
        """
        if sequence_parallel_size == 1:
            return None
        target = AttentionTarget.of(model_name_or_path)
        core = target.core_name(core_attn_implementation)
        length = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and (length is None or length % sequence_parallel_size):
            raise ValueError(
                f"seq_length={length} with seq_length_is_variable=False must be a multiple of "
                f"sequence_parallel_size={sequence_parallel_size}"
            )
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size)
        attention = cls(
            attn=attention_function(core),
            batch_size=micro_batch_size,
            process_group=parallel_state_sp.get_sequence_parallel_group(),
            seq_length_is_variable=seq_length_is_variable,
            local_seq_length=None if length is None else length // sequence_parallel_size,
            global_seq_length=length,
            disable_in_eval=disable_in_eval,
            **target.counts,
        )
        attention.take_over(core, target)
        return parallel_state_sp

    @untraced
    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention, with the interface of Transformers' attention functions.

        ``attention_mask`` is a `DeferredMask` (from the registered mask function), the padding [batch, own tokens], or
        None.

        Raises:
            ValueError: the model needs something that shards do not support: a custom mask, a position bias, keys of
                another length than the queries (a cache, or cross-attention), a window that is not causal, dropout
                with fewer heads than ranks.
        """
        if self.disable_in_eval and not self._is_training(module):
            own = attention_mask.local if isinstance(attention_mask, DeferredMask) else attention_mask
            out, _ = self.attn(module, query, key, value, own, *args, **kwargs)
            return out, None
        self.calls += 1
        self._check(module, query, key, attention_mask, kwargs)
        comm = communicator_of(self.process_group)
        plan = self.plan
        if (query.shape[1], key.shape[1]) != (plan.heads, plan.kv_heads):  # layers may differ
            plan = HeadAssignment(query.shape[1], key.shape[1], comm.size)
        sequence = self._sequence(query, attention_mask, kwargs.pop("position_ids", None))
        exchange = HeadExchange(comm, plan.lengths(comm.rank, sequence.lengths))
        keys, queries = plan.keys(comm.rank), plan.queries(comm.rank)
        query, key, value = exchange.to_heads((query, key, value), (queries, keys, keys))
        group = plan.group_of(comm.rank)
        if group is None:
            index = torch.tensor(plan.key_of_query(comm.rank), device=key.device)
            key, value, group = key.index_select(1, index), value.index_select(1, index), 1
        window = kwargs.get("sliding_window")
        seen = sequence.visibility(_is_causal(module, kwargs), None if window is None else int(window))
        if plan.head_groups > 1:
            ring = Ring(comm, plan.parts(sequence.lengths), plan.width)
            out = _ring_attention(ring, query, key, value, seen, kwargs)
        else:
            local = _LocalHeads(module, group)
            out = _full_attention(self.attn, local, query, key, value, seen, sequence, args, kwargs)
        back = HeadExchange(comm, exchange.lengths, heads_dim=2, tokens_dim=1)
        return back.to_tokens(out, queries), None

    def take_over(self, core: str, target: AttentionTarget) -> None:
        """Register with Transformers in place of ``core``.

        The mode of the model, if given, then decides whether a forward is an evaluation, not that of single layers:
        frozen layers may be in evaluation mode while the model is trained on shards. After its first forward, before
        any gradient, ValueError is raised unless each layer has called this attention. Some models accept any attention
        but keep computing their own, which would see only one shard.
        """
        register(self.forward, core, target)
        if not isinstance(target.model, nn.Module):
            return
        self._model = weakref.ref(target.model)
        layers = (
            int(getattr(target.config, "num_hidden_layers", 1)) if target.layers is None else target.layers
        )
        before = self.calls

        def check(model: nn.Module, *_: Any) -> None:
            if self.disable_in_eval and not model.training:
                return
            handle.remove()
            calls = self.calls - before
            if calls < layers:
                raise ValueError(
                    f"{target.name} cannot be trained with sequence parallelism: {calls} of its {layers} layers "
                    "called the registered attention; the others compute their own and would only see one shard of "
                    "the sequence"
                )

        handle = target.model.register_forward_hook(check)

    def _is_training(self, module: nn.Module) -> bool:
        model = self._model() if self._model is not None else None
        return (module if model is None else model).training

    def _sequence(self, query: Tensor, mask: Any, positions: Tensor | None) -> SequenceMetadata:
        comm, equal = communicator_of(self.process_group), self.equal_lengths
        if isinstance(mask, DeferredMask):
            packed = mask.is_packed() if positions is None else None
            return mask.whole(
                lambda: gather_sequence(comm, query, positions, mask.padding, equal=equal, packed=packed)
            )
        return gather_sequence(comm, query, positions, mask, equal=equal)

    def _check(
        self, module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> None:
        name = type(module).__name__
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{name}: {query.shape[2]} queries attend to {key.shape[2]} keys. Sequence parallelism shards one "
                "sequence that attends to itself; with a cache of keys (generation) register with "
                "disable_in_eval=True and call model.eval()"
            )
        if self.local_seq_length is not None and query.shape[2] != self.local_seq_length:
            raise ValueError(
                f"{name}: the shard has {query.shape[2]} tokens, but seq_length / sequence_parallel_size is "
                f"{self.local_seq_length} with seq_length_is_variable=False; set seq_length_is_variable=True"
            )
        given = [argument for argument in _REFUSED if kwargs.get(argument) is not None]
        if given:
            raise ValueError(
                f"{name} passes {given[0]} to its attention, which sequence parallelism cannot shard"
            )
        if isinstance(mask, DeferredMask) and (unknown := mask.unknown_parts()):
            raise ValueError(
                f"{name} makes its attention mask with {', '.join(unknown)}, which cannot be derived from "
                "shards of a sequence; sequence parallelism supports causal and full attention, sliding "
                "windows, packed documents and padding"
            )
        if isinstance(mask, Tensor) and mask.dim() != 2:
            raise ValueError(
                f"{name} got an attention mask of shape {list(mask.shape)}, made for its shard of the sequence alone; "
                "pass position_ids for packed documents, and the padding as [batch, tokens]"
            )


def shard_attention(
    model: nn.Module, process_group: Any, *, disable_in_eval: bool = False, layers: int | None = None
) -> str:
    """Set `UlyssesSPAttentionHF` over ``process_group`` as the attention of a Transformers model, for sequences of any
    length, and return the name of the local attention. ``layers``: number of layers that its first forward runs, if
    not all. ValueError: as in ``register_with_transformers``."""
    target = replace(AttentionTarget.of(model), layers=layers)
    core = target.core_name(None)
    attention = UlyssesSPAttentionHF(
        attn=attention_function(core),
        batch_size=1,
        process_group=process_group,
        seq_length_is_variable=True,
        disable_in_eval=disable_in_eval,
        **target.counts,
    )
    attention.take_over(core, target)
    return core


class _LocalHeads:
    """Proxy of an attention module for the local attention, with this rank's number of heads."""

    def __init__(self, module: nn.Module, group: int) -> None:
        self._module = module
        self.num_key_value_groups = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _ring_attention(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, seen: Visibility, kwargs: dict[str, Any]
) -> Tensor:
    for argument in ("dropout", "softcap"):
        if kwargs.get(argument):
            raise ValueError(
                f"sequence parallelism with fewer heads than ranks does not support {argument}: set it to 0 "
                "in the model's config, or use a smaller sequence_parallel_size"
            )
    scale = kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1])
    return ring_attention(query, key, value, seen, scale, ring).transpose(1, 2)


def _full_attention(
    attn: Callable[..., Any],
    local: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Visibility,
    sequence: SequenceMetadata,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """Run the local attention over all tokens: [batch, heads, tokens, size] -> [batch, tokens, heads, size]."""
    kwargs = {**kwargs, "is_causal": seen.causal}
    if "flash" in getattr(attn, "__name__", ""):  # supports packing, padding and windows itself
        if seen.documents is not None:
            kwargs["position_ids"] = sequence.positions
        return attn(local, query, key, value, seen.valid, *args, **kwargs)[0]
    kwargs.pop("sliding_window", None)

    def attend(seen: Visibility, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = range(query.shape[2])
        mask = None if seen.is_plain(len(tokens)) else seen.mask(tokens, tokens, query.device)
        return attn(local, query, key, value, mask, *args, **kwargs)[0]

    segments = seen.segments()
    if segments is None:
        return attend(seen, query, key, value)
    alone = Visibility(causal=seen.causal, window=seen.window)
    rows = []
    for at, bounds in enumerate(segments):  # per document: no work across documents, no large mask
        own = ([each[at : at + 1, :, start:stop] for each in (query, key, value)] for start, stop in bounds)
        rows.append(torch.cat([attend(alone, *each) for each in own], dim=1))
    return torch.cat(rows)

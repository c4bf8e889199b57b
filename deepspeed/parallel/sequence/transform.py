"""``sequence_parallel_size`` for an unmodified Transformers model that is fed whole sequences.

The ranks that share a sequence get the same batch (from the engine's data loader). In training each rank takes its
shard, attention exchanges heads for tokens, and the returned loss is the mean over the tokens of all shards, on every
rank. In evaluation and ``generate`` every rank processes the whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks

from deepspeed.base.staged import Staged
from deepspeed.comm.collectives import communicator_of
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.parallel.sequence.exchange import join_shards
from deepspeed.parallel.sequence.fpdt_layer import FPDT_Attention
from deepspeed.parallel.sequence.hf.attention import shard_attention
from deepspeed.parallel.sequence.hf.dataloader import IGNORED, shards_of, with_shifted_labels
from deepspeed.parallel.sequence.hf.loss import token_mean, token_sum
from deepspeed.parallel.sequence.hf.registration import is_sharded
from deepspeed.parallel.sequence.layer import DistributedAttention
from deepspeed.transforms.errors import TransformRefusedError
from deepspeed.transforms.inputs import ForwardFacts

if TYPE_CHECKING:
    from deepspeed.transforms.module_transforms import TransformContext

_SHIFTED, _ALIGNED = ("ForCausalLM",), ("ForMaskedLM", "ForTokenClassification")
"""Loss types whose positions predict the next token's label, or their own token's."""


@dataclass(frozen=True)
class ShardedSequences:
    """Shards sequences. Models not from Transformers, or already with sharded attention, are left unchanged."""

    name: str = "ulysses"
    after: tuple[str, ...] = ("tensor_parallel",)
    before: tuple[str, ...] = ()

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        _check_groups(module, context.mesh)
        if isinstance(module, Staged):
            context.report(module.shard_sequences(context.mesh) or "the model's own matter")
            return
        if context.mesh.size("sp") == 1 or not _takes_attention(module):
            context.report("the model's own matter")
            return
        group = context.mesh.group("sp")
        core = shard_attention(module, group, disable_in_eval=True)
        context.transform_inputs(InputSharding(module, context.mesh))
        module.register_forward_hook(_global_loss(group), with_kwargs=True)
        base: Any = getattr(module, "base_model", module)
        if base is not module:
            base.register_forward_hook(_gather_router_logits(group))
        context.report(f"each sequence on {context.mesh.size('sp')} ranks, attention by {core}")


def _check_groups(module: nn.Module, mesh: ProcessMesh) -> None:
    """Raise TransformRefusedError if the model shards attention over ranks that do not share a sequence."""
    wanted = sorted(mesh.ranks("sp"))
    for name, each in module.named_modules() if len(wanted) > 1 else ():
        if not isinstance(each, DistributedAttention) or not isinstance(each.spg, ProcessGroup):
            continue
        if sorted(ranks := get_process_group_ranks(each.spg)) != wanted:
            raise TransformRefusedError(
                f"sequence_parallel_size={len(wanted)}: {name} shares sequences among ranks {ranks}, but "
                f"here ranks {wanted} hold the shards of one sequence (adjacent ranks share layers first, "
                "by tensor_parallel.autotp_size); pass a group of these ranks to DistributedAttention"
            )


def _takes_attention(module: nn.Module) -> bool:
    own = any(isinstance(each, (DistributedAttention, FPDT_Attention)) for each in module.modules())
    config = getattr(module, "config", None)
    if own or config is None or not hasattr(config, "get_text_config"):
        return False
    name = getattr(config.get_text_config(), "_attn_implementation", None)
    return name is not None and not is_sharded(name)


@dataclass(frozen=True, eq=False)
class InputSharding:
    """Replaces whole sequences by this rank's shard, with matching position ids and labels."""

    module: nn.Module
    mesh: ProcessMesh
    name: str = "ulysses"
    after: tuple[str, ...] = ("curriculum",)
    before: tuple[str, ...] = ()

    def transform(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: ForwardFacts
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of this rank's shard. ValueError: neither ``input_ids`` nor ``inputs_embeds``; fewer tokens
        than ranks; a loss that is no mean over tokens."""
        if not facts.training:
            return args, kwargs
        batch = {**dict(zip(self._names, args, strict=False)), **kwargs}
        tokens = next(
            (batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None), None
        )
        if tokens is None or len(args) > len(self._names):
            raise ValueError(
                "pass input_ids or inputs_embeds by name, of whole sequences: [batch, tokens, ...]"
            )
        if batch.get("labels") is not None:
            batch = self._with_labels(batch)
        shard = shard_of(batch, tokens, self.mesh)
        if _balances(self.module, batch) and shard.get("attention_mask") is not None:
            shard["attention_mask"] = _drop_full_mask(batch["attention_mask"])
        if "shift_labels" in shard:
            shard["labels"] = shard["shift_labels"]  # without labels the model computes no loss
        return (), shard

    @cached_property
    def _names(self) -> list[str]:
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = inspect.signature(self.module.forward).parameters.values()
        return [each.name for each in found if each.kind in named]

    def _with_labels(self, batch: dict[str, Any]) -> dict[str, Any]:
        kind = getattr(self.module, "loss_type", None)
        if kind in _SHIFTED or kind is None and _uses_loss_function(self.module):
            return with_shifted_labels(batch)
        if kind in _ALIGNED:
            return batch
        raise ValueError(
            f"{type(self.module).__name__} has a loss of type {kind}, which is not a mean over tokens: "
            f"sequence_parallel_size supports labels for types {', '.join((*_SHIFTED, *_ALIGNED))}"
        )


def _uses_loss_function(module: nn.Module) -> bool:
    """Return whether forward uses ``loss_function``, which Transformers sets to the causal loss for classes whose name
    implies no loss type (GPT-2)."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "loss_function" in code.co_names


def shard_of(batch: dict[str, Any], tokens: Tensor, mesh: ProcessMesh) -> dict[str, Any]:
    """Return this rank's shard of a batch that contains ``tokens`` [batch, tokens, ...], with position ids."""
    if batch.get("position_ids") is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        batch = {**batch, "position_ids": positions.expand(tokens.shape[:2])}
    return shards_of(batch, mesh.size("sp"))[mesh.rank("sp")]


def shard_of_pair(
    inputs: Any, labels: Tensor | None, mesh: ProcessMesh
) -> tuple[dict[str, Any], Tensor | None]:
    """Return this rank's shard of a pipeline's batch: model inputs (or token ids alone), and labels, shifted to the
    next token's."""
    batch = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    if labels is not None:
        batch = with_shifted_labels({**batch, "labels": labels})
    shard = shard_of(batch, batch["input_ids"], mesh)
    return shard, shard.pop("shift_labels", None)


def _balances(module: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether this forward computes a load-balancing loss."""
    asked = batch.get("output_router_logits")
    config = module.config.get_text_config()
    return bool(getattr(config, "output_router_logits", False) if asked is None else asked)


def _drop_full_mask(mask: Tensor) -> None:
    """Replace a mask [batch, tokens] of ones by None. ValueError: there is padding."""
    if not bool((mask == 1).all()):
        raise ValueError(
            "with sequence_parallel_size, the load-balancing loss (output_router_logits) counts all tokens: "
            "mark padding by labels of -100 without attention_mask, or set output_router_logits to False"
        )


def _gather_router_logits(group: Any) -> Callable[..., Any]:
    """Return a forward hook of the base model that gathers router logits [tokens, experts] of all shards, so that
    load-balancing losses cover whole sequences. Backward sums their gradients over ranks."""

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        found: Any = output
        logits = found.get("router_logits") if isinstance(output, Mapping) else None
        if module.training and logits is not None:
            comm = communicator_of(group)
            found["router_logits"] = tuple(join_shards(each, comm, dim=0) for each in logits)
        return output

    return hook


def _global_loss(group: Any) -> Callable[..., Any]:
    """Return a forward hook that replaces the loss in the output by that of all shards. It is a function, so that
    copies of the module share it."""

    def of_all(loss: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if kwargs.get("num_items_in_batch") is not None:
            return token_sum(loss, group)
        return token_mean(loss, (kwargs["labels"] != IGNORED).sum(), group)

    def hook(module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get("labels") is None or not module.training:
            return output
        if isinstance(output, tuple):
            return (of_all(output[0], kwargs), *output[1:])
        balance = _balance(module, output)  # the same on all ranks
        output["loss"] = of_all(output["loss"] - balance, kwargs) + balance
        return output

    return hook


def _balance(module: Any, output: Any) -> Tensor | float:
    """Return the part of the loss that is no mean over tokens. ValueError: it was computed from this shard alone."""
    extra = next((name for name in ("aux_loss", "z_loss") if output.get(name) is not None), None)
    if extra is None:
        return 0.0
    weight = getattr(module, "router_aux_loss_coef", None)
    if extra != "aux_loss" or output.get("router_logits") is None or weight is None:
        raise ValueError(
            f"{type(module).__name__} adds its {extra} to the loss, which is known for shards of sequences only: set "
            "output_router_logits to False, or leave sequence_parallel_size out"
        )
    return weight * output["aux_loss"]

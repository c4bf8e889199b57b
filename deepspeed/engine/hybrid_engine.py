"""An engine that trains and generates, for reinforcement learning: ``hybrid_engine`` in the config."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.collectives import Communicator
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.section import note
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.parts.accumulation import PatchedMethod
from deepspeed.inference.adapters import FusedAdapters
from deepspeed.inference.generation.fused import FusedGeneration
from deepspeed.inference.generation.joined_prompts import JoinedPrompts
from deepspeed.inference.model.rotations import depends_on_length
from deepspeed.inference.split.copy import SplitCopy
from deepspeed.inference.split.layers import check_length, same_random_numbers, tensor_parallel_group
from deepspeed.zero.gathering.gathered_parameters import unwrap_model_for_generation


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """Engine whose ``generate`` gathers partitioned weights once instead of per token, without a second copy, and
    fuses adapters for its duration. Training state is unaffected.

    With ``hybrid_engine.inference_tp_size`` above 1, that many adjacent ranks generate tensor-parallel for the
    prompts of all of them; each rank gets the answers to its own.

    ``engine.module.generate`` does the same. The arguments are those of ``DeepSpeedEngine``.

    Raises:
        DeepSpeedConfigError: the module has no ``generate``, or ``inference_tp_size`` does not fit the job.
    """

    def __init__(self, args: Any, model: nn.Module, **kwargs: Any) -> None:
        super().__init__(args, model, **kwargs)
        if not callable(getattr(type(model), "generate", None)):
            raise DeepSpeedConfigError(
                f"hybrid_engine.enabled=true, but {type(model).__name__} has no generate()"
            )
        section = self._config.hybrid_engine
        if section.enable_cuda_graph:
            note(
                "hybrid_engine.enable_cuda_graph has no effect: forward passes are not captured as CUDA graphs"
            )
        self.adapters = FusedAdapters(model)
        self._inference_group = self._ranks_that_share_layers(section.inference_tp_size)
        self._batch_per_rank = self._inference_group is not None and depends_on_length(model)
        self._split_copy: SplitCopy | None = None
        self._generation = FusedGeneration()
        # Scripts check for `_generate`, and call it for the model's own generation.
        own: Any = type(model)
        self._generate = types.MethodType(own.generate, model)
        PatchedMethod(model, "generate", self.generate)

    def _ranks_that_share_layers(self, size: int) -> Communicator | None:
        """Return the tensor-parallel group of generation; None if training has the same, or size 1."""
        if size in (1, self.mp_world_size):
            return None
        if self.mp_world_size > 1:
            raise DeepSpeedConfigError(
                f"hybrid_engine.inference_tp_size={size}, but {self.mp_world_size} ranks share each layer in training: "
                f"leave it out, or use {self.mp_world_size}"
            )
        if self.world_size % size:
            raise DeepSpeedConfigError(
                f"hybrid_engine.inference_tp_size={size} with {self.world_size} ranks: must divide the number of ranks"
            )
        return tensor_parallel_group(size)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the result of the module's ``generate``. Collective on entry and exit at stage 3: all ranks call it,
        but prompts and lengths may differ.

        With ``inference_tp_size`` above 1 it is collective at every stage; the ranks of a group pass the same
        settings, ``input_ids`` and ``attention_mask`` may differ, and the result is the tensor of tokens.

        Raises:
            RuntimeError: the prompt is longer than ``hybrid_engine.max_out_tokens``.
            ValueError: tensor-parallel generation with other per-prompt inputs, or with more outputs than tokens.
        """
        section = self._config.hybrid_engine
        check_length(inputs, kwargs, section.max_out_tokens)
        kwargs.pop("synced_gpus", None)  # no rank needs another's weights during generation
        generate = self._generate_here if self._inference_group is None else self._generate_together
        try:
            return generate(*inputs, **kwargs)
        finally:
            if section.release_inference_cache:
                get_accelerator().empty_cache()

    def _generate_here(self, *inputs: Any, **kwargs: Any) -> Any:
        group = self.mesh.communicator("tp") if self.mp_world_size > 1 else None
        with (
            unwrap_model_for_generation(self) as module,
            torch.no_grad(),
            same_random_numbers(group),
            self.adapters.during(),
        ):
            return self._generation.generate(module, *inputs, synced_gpus=False, **kwargs)

    def _generate_together(self, *inputs: Any, **kwargs: Any) -> Tensor:
        group = self._inference_group
        assert group is not None
        prompts, mask = _prompts(inputs, kwargs)
        settings = [kwargs.get("generation_config"), self.module.generation_config]
        ends = _tokens("eos_token_id", kwargs, settings)
        padding = sorted(_tokens("pad_token_id", kwargs, settings) or ends or {0})[0]
        joined = JoinedPrompts(prompts, mask, padding, group, batch_per_rank=self._batch_per_rank)
        copied = self._present_copy(group)
        module: Any = copied.module.train(self.module.training)
        try:
            with torch.no_grad(), same_random_numbers(group):
                answers = [
                    type(module).generate(
                        module, input_ids=tokens, attention_mask=shown, synced_gpus=False, **kwargs
                    )
                    for tokens, shown in joined.batches
                ]
        finally:
            copied.release()
        if not all(isinstance(each, Tensor) for each in answers):
            raise ValueError(
                "hybrid_engine.inference_tp_size above 1 returns tokens only: leave out return_dict_in_generate"
            )
        return joined.own(answers, ends)

    def _present_copy(self, group: Communicator) -> SplitCopy:
        """Return the split layers, filled with the current weights. Collective."""
        section = self._config.hybrid_engine
        if self._split_copy is not None and not len(self.adapters):
            self._split_copy.fill(whole=self.sharded is None)
            return self._split_copy
        with unwrap_model_for_generation(self) as module, self.adapters.during():
            if self._split_copy is None:
                self._split_copy = SplitCopy(
                    module,
                    group,
                    pinned=section.pin_parameters,
                    layers_at_once=section.tp_gather_partition_size,
                )
            self._split_copy.fill(whole=True)
        return self._split_copy

    def fuse_lora_weight(self) -> None:
        """Fuse adapters into their base weights until ``unfuse_lora_weight``; ``generate`` does both itself.

        RuntimeError: the weights are partitioned. Then only ``generate`` can fuse, or a ``GatheredParameters`` block,
        at whose end the change is discarded, as any change without ``modifier_rank`` is.
        """
        self._require_whole_weights()
        self.adapters.fuse()

    def _require_whole_weights(self) -> None:
        if not self.adapters.whole():
            raise RuntimeError(
                "at stage 3 adapters can only be fused inside generate() or "
                "deepspeed.zero.GatheredParameters(engine.module.parameters()): here the weights are sharded"
            )

    def unfuse_lora_weight(self) -> None:
        """Restore the weights from before ``fuse_lora_weight``. RuntimeError: as there."""
        self._require_whole_weights()
        self.adapters.unfuse()

    def retake_inference_cache(self) -> None:
        """Do nothing: each call of ``generate`` has its own KV cache."""


def _prompts(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Pop tokens and mask from ``kwargs``. ValueError: there are other per-prompt inputs."""
    given = [kwargs.pop(name) for name in ("input_ids", "inputs") if name in kwargs]
    given = [each for each in (*inputs, *given) if each is not None]
    mask = kwargs.pop("attention_mask", None)
    others = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    if len(given) != 1 or not isinstance(given[0], Tensor) or others:
        raise ValueError(
            "hybrid_engine.inference_tp_size above 1 generates from input_ids and attention_mask only, but "
            f"got {', '.join(others) or f'{len(given)} inputs'}"
        )
    return given[0], mask


def _tokens(name: str, kwargs: dict[str, Any], settings: list[Any]) -> set[int]:
    """Return the token ids of setting ``name``: from the argument, else from the settings of the call or of the
    model."""
    for found in (kwargs.get(name), *(getattr(each, name, None) for each in settings)):
        if found is not None:
            return {int(each) for each in ([found] if isinstance(found, int) else found)}
    return set()

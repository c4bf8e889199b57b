"""Tiny random models of many architectures of Transformers, and the comparison of a split one with the whole.

``python -m tests.clients.architectures`` prints the table of docs/tensor_parallel_models.md for 2 and 4 ranks.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from deepspeed.checkpoint.placement import placement_of
from deepspeed.parallel.tensor.apply import apply_plan
from deepspeed.parallel.tensor.logits import VocabParallelLogits
from deepspeed.parallel.tensor.planning.plan import ParameterPlan, TensorParallelPlan
from deepspeed.parallel.tensor.planning.planner import plan_module
from deepspeed.parallel.tensor.trial import try_split
from tests.parallel.tensor.threads import ThreadGroup, run_ranks

TOKENS = 96
CAUSAL, MASKED, TWO = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
_SHAPE = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_SIZED = {**_GROUPED, "head_dim": 8}
_GPT = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4}
_T5 = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_BART = {
    "vocab_size": TOKENS,
    "d_model": 32,
    "max_position_embeddings": 64,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
}
_IMAGES = {k: v for k, v in _SHAPE.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """``config``: class of Transformers; ``settings``: its arguments; ``notes``: what it shows."""

    config: str
    settings: dict[str, Any]
    notes: str
    auto: str = CAUSAL


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaConfig", _GROUPED, "grouped heads"),
    "mistral": Architecture("MistralConfig", _GROUPED, "sliding window"),
    "qwen2": Architecture("Qwen2Config", _GROUPED, "biases of queries, keys and values"),
    "qwen3": Architecture("Qwen3Config", _SIZED, "norm of each head"),
    "gemma": Architecture("GemmaConfig", {**_SIZED, "num_key_value_heads": 1}, "one key head"),
    "gemma2": Architecture("Gemma2Config", _SIZED, "soft caps, norms after the layers"),
    "gemma3": Architecture("Gemma3TextConfig", _SIZED, "norm of each head, two rotary tables"),
    "phi": Architecture("PhiConfig", _SHAPE, "parallel layers, biases"),
    "phi3": Architecture("Phi3Config", {**_GROUPED, "pad_token_id": 0}, "fused qkv and gate-up"),
    "gpt2": Architecture("GPT2Config", _GPT, "`Conv1D`, fused qkv"),
    "gptj": Architecture("GPTJConfig", {**_GPT, "rotary_dim": 4}, "partial rotation"),
    "gpt_neo": Architecture(
        "GPTNeoConfig",
        {
            "vocab_size": TOKENS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "intermediate_size": 48,
        },
        "local attention",
    ),
    "gpt_neox": Architecture("GPTNeoXConfig", _SHAPE, "qkv interleaved by heads"),
    "gpt_bigcode": Architecture("GPTBigCodeConfig", _GPT, "one key head, fused"),
    "codegen": Architecture(
        "CodeGenConfig",
        {**_GPT, "n_embd": 64, "n_head": 8, "rotary_dim": 4},
        "fused qkv in four blocks of heads",
    ),
    "opt": Architecture(
        "OPTConfig",
        {
            "vocab_size": TOKENS,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 64,
        },
        "learned positions",
    ),
    "bloom": Architecture(
        "BloomConfig", {"vocab_size": TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi, fused"
    ),
    "mpt": Architecture(
        "MptConfig",
        {"vocab_size": TOKENS, "d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2},
        "ALiBi, fused",
    ),
    "falcon": Architecture("FalconConfig", {**_SHAPE, "multi_query": True}, "one key head, fused"),
    "falcon_grouped": Architecture(
        "FalconConfig",
        {**_SHAPE, "new_decoder_architecture": True, "num_kv_heads": 2},
        "fused in groups of heads",
    ),
    "falcon_alibi": Architecture(
        "FalconConfig",
        {**_SHAPE, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
        "ALiBi, fused",
    ),
    "olmo": Architecture("OlmoConfig", _GROUPED, "norms without weights"),
    "olmo2": Architecture("Olmo2Config", _GROUPED, "norm over all heads"),
    "glm": Architecture("GlmConfig", {**_SIZED, "pad_token_id": 0}, "fused gate-up"),
    "glm4": Architecture("Glm4Config", {**_SIZED, "pad_token_id": 0}, "norms after the layers"),
    "cohere": Architecture("CohereConfig", _GROUPED, "parallel layers, scaled logits"),
    "cohere2": Architecture("Cohere2Config", _GROUPED, "layers with and without positions"),
    "stablelm": Architecture("StableLmConfig", _GROUPED, "partial rotation"),
    "starcoder2": Architecture("Starcoder2Config", _GROUPED, "biases"),
    "granite": Architecture("GraniteConfig", _GROUPED, "scaled residuals"),
    "smollm3": Architecture("SmolLM3Config", {**_GROUPED, "pad_token_id": 0}, "layers without positions"),
    "nemotron": Architecture("NemotronConfig", _GROUPED, "squared ReLU"),
    "persimmon": Architecture("PersimmonConfig", _SHAPE, "fused, norm of each head"),
    "exaone4": Architecture("Exaone4Config", _GROUPED, "norms after the layers"),
    "mixtral": Architecture("MixtralConfig", {**_GROUPED, "num_local_experts": 4}, "experts"),
    "qwen2_moe": Architecture(
        "Qwen2MoeConfig", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 24}, "shared expert"
    ),
    "qwen3_moe": Architecture("Qwen3MoeConfig", {**_SIZED, **_EXPERTS}, "experts"),
    "deepseek_v3": Architecture("DeepseekV3Config", {**_SHAPE, **_LATENT}, "latent attention, experts"),
    "gpt_oss": Architecture(
        "GptOssConfig", {**_SIZED, "num_local_experts": 4, "num_experts_per_tok": 2}, "sinks, experts"
    ),
    "bert": Architecture("BertConfig", _SHAPE, "encoder", MASKED),
    "roberta": Architecture("RobertaConfig", {**_SHAPE, "max_position_embeddings": 64}, "encoder", MASKED),
    "distilbert": Architecture(
        "DistilBertConfig",
        {
            "vocab_size": TOKENS,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
        },
        "encoder",
        MASKED,
    ),  # fmt: skip
    "electra": Architecture("ElectraConfig", {**_SHAPE, "embedding_size": 32}, "encoder", MASKED),
    "vit": Architecture(
        "ViTConfig", {**_IMAGES, "num_labels": 7}, "images", "AutoModelForImageClassification"
    ),
    "clip": Architecture("CLIPVisionConfig", _IMAGES, "images", "AutoModel"),
    "t5": Architecture("T5Config", _T5, "encoder and decoder, position biases", TWO),
    "bart": Architecture("BartConfig", _BART, "encoder and decoder", TWO),
}


def make(name: str, **more: Any) -> nn.Module:
    """In training mode, without dropout; weights large enough for all gradients to count."""
    made = ARCHITECTURES[name]
    config = getattr(transformers, made.config)(**{**made.settings, **more})
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = getattr(transformers, made.auto).from_config(config)
    for param in model.parameters():
        nn.init.normal_(param, 0.7 if param.ndim == 1 else 0.0, 0.3 if param.ndim == 1 else 0.15)
    return model.train()


def batch(model: Any) -> dict[str, Tensor]:
    """Two examples, one of them padded."""
    numbers = torch.Generator().manual_seed(3)
    if model.main_input_name == "pixel_values":
        side = model.config.image_size
        return {"pixel_values": torch.randn(2, 3, side, side, generator=numbers)}
    tokens = torch.randint(3, 90, (2, 9), generator=numbers)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    made = {"input_ids": tokens, "attention_mask": mask}
    return {**made, "decoder_input_ids": tokens} if model.config.is_encoder_decoder else made


def with_labels(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of every token but some, where the model is one of language."""
    if "input_ids" not in inputs:
        return inputs
    tokens = inputs["input_ids"]
    return {**inputs, "labels": tokens.masked_fill(tokens % 7 == 0, -100)}


def loss_of(outputs: Any) -> Tensor:
    """Every logit has a part in it, and the model's own loss."""
    logits = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    of_logits = 10 * (logits.float() * weights).mean()
    own = getattr(outputs, "loss", None)
    return of_logits if own is None else of_logits + own


def never_whole(outputs: Any) -> bool:
    """Return whether a rank has only its part of the logits."""
    logits = getattr(outputs, "logits", None)
    return isinstance(logits, VocabParallelLogits) and logits.state.whole is None


def own_part(whole: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part, ``param``, of the ``whole`` tensor."""
    boxes = placement_of(param).boxes
    if not boxes:
        return whole
    parts = [whole[tuple(slice(*side) for side in box)] for box in boxes]
    split = next((dim for dim in range(whole.ndim) if len({box[dim] for box in boxes}) > 1), 0)
    return torch.cat(parts, split)


class Whole:
    """The loss and gradients of the model on one rank."""

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        model = copy.deepcopy(model)
        self.loss = loss_of(model(**inputs))
        self.loss.backward()
        self.loss = self.loss.detach()
        self.grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.total = float(nn.utils.get_total_norm(list(self.grads.values())))

    def error(self, name: str, param: Tensor, grad: Tensor) -> float:
        """Of the gradient of this rank's part, relative. Gradients of biases of keys cancel to zero: what is left of
        them is rounding of the terms, and counts against 1e-2 of the norm of all."""
        own = own_part(self.grads[name], param)
        scale = max(float(own.norm()), 1e-3 * float(self.grads[name].norm()), 1e-2 * self.total)
        return float((grad.view(own.shape) - own).norm()) / scale


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors of a split model, relative: the loss's, and the largest of a gradient with the parameter's name.
    ``in_parts``: no rank had whole logits for the model's own loss. ``tried``: what the trial before
    the split said."""

    loss: float
    gradient: float
    worst: str
    in_parts: bool
    plan: TensorParallelPlan
    tried: str


def compare(name: str, ranks: int, **more: Any) -> Comparison:
    """Split over threads by its graph."""
    model = make(name, **more)
    inputs = with_labels(model, batch(model))
    whole = Whole(model, inputs)
    plan = plan_module(model, ranks)
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    tried: list[str] = []

    def work(group: ThreadGroup) -> tuple[float, float, str, bool]:
        own = copies[group.rank]
        tried.append(try_split(plan, group))
        apply_plan(own, plan, group, lambda *_: None)
        outputs = own(**inputs)
        in_parts = never_whole(outputs)
        loss = loss_of(outputs)
        loss.backward()
        found = {
            key: whole.error(key, param, torch.zeros_like(param) if param.grad is None else param.grad)
            for key, param in own.named_parameters()
            if key in whole.grads
        }
        worst = max(found, key=lambda key: found[key])
        error = (loss.detach() - whole.loss).abs() / (whole.loss.abs() + 0.1)  # terms of about 1 may cancel
        return float(error), found[worst], worst, in_parts

    every = run_ranks(ranks, work)
    worst = max(every, key=lambda each: each[1])
    return Comparison(max(each[0] for each in every), worst[1], worst[2], worst[3], plan, tried[0])


def table(sizes: Sequence[int], names: Iterable[str] = ARCHITECTURES) -> str:
    """Rows in Markdown, with the largest errors over all numbers of ranks."""
    rows = [
        f"| architecture | shows | layers split ({' / '.join(map(str, sizes))} ranks) | stays whole | logits | loss | "
        "gradients |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        found = [compare(name, ranks) for ranks in sizes]
        split = [sum(each.kind != "sliced" for each in weights(one.plan)) for one in found]
        reasons = dict.fromkeys(why for one in found for why in one.plan.whole.values())
        whole = " / ".join(str(len(one.plan.whole)) for one in found) if reasons else "0"
        rows.append(
            f"| {name} | {ARCHITECTURES[name].notes} | {' / '.join(map(str, split))} "
            f"| {whole}{': ' if reasons else ''}{'; '.join(reasons)} "
            f"| {'in parts' if all(one.in_parts for one in found) else 'whole'} "
            f"| {max(one.loss for one in found):.0e} | {max(one.gradient for one in found):.0e} |"
        )
    return "\n".join(rows)


def weights(plan: TensorParallelPlan) -> list[ParameterPlan]:
    return [each for name, each in plan.parameters.items() if not name.endswith("bias")]


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(table([int(each) for each in sys.argv[1:]] or [2, 4]))

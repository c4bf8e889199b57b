"""The models of the three steps, the text that goes into them, and how whole weights leave an engine."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from losses import last, positions_of, wide
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import deepspeed


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "</s>", "<unk>", *words]
    raw = Tokenizer(models.WordLevel({word: at for at, word in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


def small_model(tokenizer: Any, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return in_dtype(LlamaForCausalLM(sizes), dtype)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """``model`` in float32, or in float64 throughout: root-mean-square norms of Transformers compute in float32, so
    that torch's take their place."""
    if dtype != torch.float64:
        return model
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if hasattr(layer, "variance_epsilon"):
                norm = nn.RMSNorm(layer.weight.shape, layer.variance_epsilon)
                norm.weight = layer.weight
                setattr(owner, name, norm)
    return model.double()


def _dropouts(folder: Path, share: float | None) -> dict[str, float]:
    """What the config of the model calls its dropouts, and what they are to be."""
    if share is None:
        return {}
    known = AutoConfig.from_pretrained(folder).to_dict()
    return {name: share for name in known if name.endswith(("dropout", "pdrop"))}


def has_dropout(model: nn.Module) -> bool:
    """Whether its forward in training leaves something out at random."""
    modules: list[Any] = list(model.modules())
    configs = [each.config for each in modules if isinstance(each, PreTrainedModel)]
    shares = [
        value
        for config in configs
        for name, value in config.to_dict().items()
        if name.endswith(("dropout", "pdrop", "layerdrop"))
    ]
    shares += [each.p for each in modules if isinstance(each, nn.Dropout)]
    return any(isinstance(share, float) and share > 0 for share in shares)


def load_policy(folder: Path, dropout: float | None = None, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **_dropouts(folder, dropout))
    for name in ("temperature", "top_p", "top_k"):  # sampling is ours
        setattr(model.generation_config, name, None)
    return in_dtype(model, dtype)


def load_tokenizer(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


class ScoredModel(nn.Module):
    """A transformer with a number for each token: a reward model reads it at the last token, a critic at all.

    Args:
        base: without a language model's head.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.head = nn.Linear(base.config.hidden_size, 1, bias=False)  # type: ignore[union-attr, arg-type]
        # [Note: a head of zeros] Its base would get no gradient at first, and then a tiny one, of which Adam makes
        # steps of full size: 60 updates amplified rounding a hundred-millionfold, so that each number of ranks ended
        # with another model. From small random weights it is a thousandfold.
        spread = getattr(base.config, "initializer_range", 0.02)
        nn.init.normal_(self.head.weight, std=spread, generator=torch.Generator().manual_seed(0))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[rows, length], wide."""
        hidden = self.base(tokens, **context(without_adapters(self.base), mask)).last_hidden_state
        return wide(self.head(hidden)[..., 0])

    @classmethod
    def load(
        cls, folder: Path, dropout: float | None = None, dtype: torch.dtype = torch.float32
    ) -> ScoredModel:
        """From a policy's folder, or from one that ``save_scored`` wrote."""
        base = AutoModel.from_pretrained(folder, dtype=dtype, **_dropouts(folder, dropout))
        model = cls(in_dtype(base, dtype)).to(dtype)
        if (head := folder / "head.pt").exists():
            model.head.load_state_dict(torch.load(head, weights_only=True))
        return model


def context(model: Any, mask: Tensor) -> dict[str, Any]:
    """What a forward needs to know of padding on the left."""
    found: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        found["position_ids"] = positions_of(mask)
    return found


def score_at_end(engine: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """[rows]: what a reward model says of whole dialogues."""
    return engine(tokens, mask).gather(1, last(mask)[:, None])[:, 0]


def with_adapters(model: Any, rank: int, only: bool = True) -> Any:
    """LoRA on every linear layer but the head, which goes on to train if it gives scores; ``rank`` 0: none."""
    if rank == 0:
        return model
    if isinstance(model, ScoredModel):
        model.base = with_adapters(model.base, rank, only)
        return model
    from peft import LoraConfig, get_peft_model

    dtype = next(model.parameters()).dtype
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    if not only:
        adapted.requires_grad_(True)
    return adapted.to(dtype)


def without_adapters(module: Any) -> Any:
    """The model of Transformers below adapters."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def beginning(tokenizer: Any, text: str, lead: int) -> list[int]:
    """Tokens of a prompt, behind ``lead`` tokens with which every text of the model begins: its own kind of such a
    token or, if there is none, padding. The model sees them."""
    begin = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return [begin] * lead + tokenizer(text, add_special_tokens=False).input_ids


def encode_prompts(
    tokenizer: Any, questions: list[str], device: Any, lead: int = 0, most: int | None = None
) -> dict[str, Tensor]:
    """``tokens`` and ``mask`` [rows, length]: prompts padded on the left.

    Args:
        most: tokens of a prompt, the leading ones too; of a longer one the end is left out, as tokenizers do.
    """
    made = [beginning(tokenizer, question, lead)[:most] for question in questions]
    length = max(map(len, made))
    tokens = torch.full((len(made), length), tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(made):
        tokens[row, length - len(ids) :] = torch.tensor(ids)
        mask[row, length - len(ids) :] = 1
    return {"tokens": tokens.to(device), "mask": mask.to(device)}


def encode(tokenizer: Any, pairs: list[tuple[str, str]], device: Any, lead: int = 0) -> dict[str, Tensor]:
    """``tokens``, ``mask`` and ``answers`` [rows, length]: dialogues padded on the left, with the end-of-text token;
    ``answers`` is 1 where a token is part of an answer. ``lead``: see ``beginning``."""
    made = []
    for question, answer in pairs:
        first = beginning(tokenizer, question, lead)
        second = [*tokenizer(" " + answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        made.append((first, second))
    length = max(len(first) + len(second) for first, second in made)
    tokens = torch.full((len(made), length), tokenizer.pad_token_id)
    mask, answers = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, (first, second) in enumerate(made):
        tokens[row, length - len(first) - len(second) :] = torch.tensor(first + second)
        mask[row, length - len(first) - len(second) :] = 1
        answers[row, length - len(second) :] = 1
    return {"tokens": tokens.to(device), "mask": mask.to(device), "answers": answers.to(device)}


def save_policy(engine: Any, tokenizer: Any, folder: Path) -> None:
    """Whole weights with the adapters in them, as ``from_pretrained`` reads them. Collective."""
    module = engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        if torch.distributed.get_rank() == 0:
            adapted = hasattr(module, "merge_adapter")
            kept = {name: param.detach().clone() for name, param in module.named_parameters()}
            if adapted:
                module.merge_adapter()
            plain = {
                name.removeprefix("base_model.model.").replace(".base_layer", ""): param.detach().clone()
                for name, param in module.named_parameters()
                if "lora_" not in name
            }
            if adapted:
                module.unmerge_adapter()
                for name, param in module.named_parameters():
                    param.data.copy_(kept[name])
            inner = module.get_base_model() if adapted else module
            inner.config.save_pretrained(folder)
            inner.generation_config.save_pretrained(folder)
            from safetensors.torch import save_file

            tied = set(getattr(inner, "_tied_weights_keys", None) or ()) - plain.keys()
            save_file(
                {name: value for name, value in plain.items() if name not in tied},
                folder / "model.safetensors",
                {"format": "pt"},
            )
            tokenizer.save_pretrained(folder)
    torch.distributed.barrier()


def save_scored(engine: Any, folder: Path) -> None:
    """As ``ScoredModel.load`` reads it. Collective."""
    module = engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        if torch.distributed.get_rank() == 0:
            module.base.save_pretrained(
                folder, state_dict={name: each.clone() for name, each in module.base.state_dict().items()}
            )
            torch.save(
                {name: each.clone() for name, each in module.head.state_dict().items()}, folder / "head.pt"
            )
    torch.distributed.barrier()

"""Shared by the client tests: tiny random models, data, and a process state that ends with the test.

The clients keep process-wide singletons (Accelerate's states, the config that Transformers remembers, environment
variables that plugins write); `clean_clients` gives each test its own and takes them back.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

VOCAB = 64
LENGTH = 12


@contextlib.contextmanager
def clean_clients(*, deepspeed_state: bool = True) -> Iterator[None]:
    """Fresh client singletons. With `deepspeed_state`, Accelerate believes it was launched for DeepSpeed on gloo
    (without a GPU it has to be told the backend). A FutureWarning that comes from us is an error."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    before = dict(os.environ)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=FutureWarning, module=r"deepspeed(\..*)?")
            if deepspeed_state:
                os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
                PartialState(backend="gloo")
                del os.environ["ACCELERATE_USE_DEEPSPEED"]
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(before)
        gc.collect()


@contextlib.contextmanager
def bf16_without_gpu() -> Iterator[None]:
    """Transformers refuses `bf16=True` where it sees no accelerator; this machine has none."""
    import transformers.training_args as training_args

    original = training_args.is_torch_bf16_gpu_available
    training_args.is_torch_bf16_gpu_available = lambda: True
    try:
        yield
    finally:
        training_args.is_torch_bf16_gpu_available = original


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(sizes | changes))


def llama(seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(**changes))


def lora(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    adapter = {key: options.pop(key) for key in ("autocast_adapter_dtype",) if key in options}
    settings: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    return get_peft_model(model, LoraConfig(**(settings | options)), **adapter)


class Tokens(torch.utils.data.Dataset):
    """`size` fixed random sequences, labels equal to the inputs."""

    def __init__(self, size: int = 16, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(3, VOCAB, (size, LENGTH), generator=draw)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def auto_config(stage: int, **sections: Any) -> dict[str, Any]:
    """The JSON that Transformers' documentation recommends: "auto" wherever TrainingArguments know the value."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    zero["reduce_bucket_size"] = "auto"
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    config: dict[str, Any] = {
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    return config | sections


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters of a model or engine, whole, on every rank. Collective."""
    import deepspeed

    model = model.module if isinstance(model, deepspeed.DeepSpeedEngine) else model
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"differ: {different}"

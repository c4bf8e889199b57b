"""Preference training (DPO) with TRL: a policy and a frozen reference, both at ZeRO stage 3.

    python examples/dpo_trl/train.py
    torchrun --nproc-per-node 2 examples/dpo_trl/train.py

The preferences are made up: the continuation that keeps counting is chosen, the one that repeats is rejected. Shows
that the loss starts at ln 2 (policy and reference are equal) and that the margin between chosen and rejected grows.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

NUMBERS = [str(i) for i in range(60)]


def start() -> bool:
    """Without a launcher, be the only rank; without a GPU, tell Accelerate the backend. True on CPU."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29513",
    }
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
    return on_cpu


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<s>", "</s>", "<unk>", *NUMBERS]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def preferences() -> Dataset:
    starts = range(len(NUMBERS) - 8)
    return Dataset.from_dict(
        {
            "prompt": [" ".join(NUMBERS[i : i + 4]) for i in starts],
            "chosen": [" " + " ".join(NUMBERS[i + 4 : i + 8]) for i in starts],
            "rejected": [" " + " ".join([NUMBERS[i + 3]] * 4) for i in starts],
        }
    )


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=len(NUMBERS) + 4,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_dpo_trl"))
    options = parser.parse_args()
    on_cpu = start()
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    args = DPOConfig(
        output_dir=str(options.output),
        deepspeed={
            "zero_optimization": zero,
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "gradient_accumulation_steps": "auto",
            "train_micro_batch_size_per_gpu": "auto",
        },
        accelerator_config={"use_configured_state": on_cpu},
        bf16=not on_cpu,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        max_steps=options.steps,
        max_length=16,
        learning_rate=2e-3,
        logging_steps=max(1, options.steps // 10),
        logging_first_step=True,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    run = DPOTrainer(model(), model(), args, train_dataset=preferences(), processing_class=tokenizer())
    run.train()
    if run.is_world_process_zero():
        log = [entry for entry in run.state.log_history if "rewards/margins" in entry]
        print(f"loss {log[0]['loss']:.4f} (ln 2 = 0.6931) -> {log[-1]['loss']:.4f}")
        print(f"margin {log[0]['rewards/margins']:.4f} -> {log[-1]['rewards/margins']:.4f}")


if __name__ == "__main__":
    main()

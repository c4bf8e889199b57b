"""TRL: SFT, DPO, GRPO, frozen reference models, and generation at stage 3 with ranks that end at other lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.kit import (
    VOCAB,
    assert_same_weights,
    auto_config,
    clean_clients,
    llama,
    lora,
    whole_weights,
)
from tests.pool import distributed

pytest.importorskip("trl", reason="the clients extra is not installed")
pytest.importorskip("datasets", reason="the clients extra is not installed")

WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()


def tokenizer() -> Any:
    """Whitespace words; made here, as nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def options(folder: Path, stage: int, **changes: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "deepspeed": auto_config(stage),
        "accelerator_config": {"use_configured_state": True},
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 2e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": False,
    }
    return common | changes


def history(run: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in run.state.log_history if key in entry]


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_sft(tmp_path: Path, stage: int) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"text": [" ".join(WORDS[i : i + 8]) for i in range(16)]})
    with clean_clients():
        run = SFTTrainer(
            model=llama(),
            args=SFTConfig(**options(tmp_path, stage), max_length=16),
            train_dataset=rows,
            processing_class=tokenizer(),
        )
        run.train()
        assert history(run)[-1] < history(run)[0]


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_dpo(tmp_path: Path, stage: int, adapter: bool) -> None:
    """With a second, frozen engine as the reference, or with the base under the adapter as the reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = Dataset.from_dict(
        {
            "prompt": [" ".join(WORDS[i : i + 4]) for i in range(16)],
            "chosen": [" " + " ".join(WORDS[i + 4 : i + 8]) for i in range(16)],
            "rejected": [" " + " ".join(WORDS[:4]) for i in range(16)],
        }
    )
    with clean_clients():
        run = DPOTrainer(
            model=lora(llama()) if adapter else llama(),
            ref_model=None if adapter else llama(),
            args=DPOConfig(**options(tmp_path, stage), max_length=16),
            train_dataset=pairs,
            processing_class=tokenizer(),
        )
        reference = None if adapter else whole_weights(run.ref_model)
        run.train()
        measured = history(run)
        assert measured[0] == pytest.approx(0.6931, abs=1e-3), "model and reference start equal"
        assert measured[-1] < measured[0]
        assert history(run, "rewards/margins")[-1] > 0
        if reference is not None:
            assert_same_weights(whole_weights(run.ref_model), reference)


def prompt(length: int) -> torch.Tensor:
    return torch.arange(3, 3 + length)[None]


@pytest.mark.parametrize("gather", [True, False])
@distributed(world_size=2)
def test_generate_at_stage_3_with_uneven_lengths(gather: bool) -> None:
    """Each rank generates any number of tokens, while TRL removes the hooks and adds them again; training continues and
    equals training without generation."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from trl.models.utils import unwrap_model_for_generation

    ids = torch.randint(3, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))

    def run(generate: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        with clean_clients():
            settings = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            }
            launched = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
            model = llama()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer = launched.prepare(model, optimizer)
            made = torch.empty(0)
            for _ in range(3):
                launched.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
                if generate:
                    count = 3 if launched.process_index == 0 else 9
                    with (
                        unwrap_model_for_generation(model, launched, gather_deepspeed3_params=gather) as bare,
                        torch.no_grad(),
                    ):
                        made = bare.generate(
                            prompt(4), do_sample=False, min_new_tokens=count, max_new_tokens=count
                        )
                    assert made.shape == (1, 4 + count)
            return whole_weights(model), made

    with_generation, made = run(True)
    without, _ = run(False)
    assert_same_weights(with_generation, without)
    plain = llama()
    plain.load_state_dict(without)
    count = made.shape[1] - 4
    expected = plain.generate(prompt(4), do_sample=False, min_new_tokens=count, max_new_tokens=count)
    assert torch.equal(made, expected)


@distributed(world_size=2)
def test_generate_with_an_engine_directly() -> None:
    """`engine.generate` falls through to the model; ranks need not agree on lengths and need no `synced_gpus`."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=llama(), config=config)
    count = 2 + 6 * torch.distributed.get_rank()
    with torch.no_grad():
        made = engine.generate(prompt(3), do_sample=False, min_new_tokens=count, max_new_tokens=count)
        expected = llama().generate(prompt(3), do_sample=False, min_new_tokens=count, max_new_tokens=count)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("synced", [True, False])
@distributed(world_size=2)
def test_synced_generation(synced: bool) -> None:
    """`synced_gpus=True` makes finished ranks run on; it works, though it is not needed here."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=llama(), config=config)
    engine.eval()
    length = 2 + torch.distributed.get_rank()
    with torch.no_grad():
        made = engine.module.generate(
            prompt(length), do_sample=False, max_new_tokens=6 - length, synced_gpus=synced
        )
    assert made.shape[1] <= 6


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_reference_model_from_trl(stage: int) -> None:
    """`prepare_deepspeed` drops the optimizer, adds dotted keys, and wants a forward-only engine."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from trl.models.utils import prepare_deepspeed

    with clean_clients():
        launched = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(
                hf_ds_config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
            )
        )
        reference = prepare_deepspeed(llama(), launched)
        with torch.no_grad():
            logits = reference(input_ids=prompt(5)).logits
        assert torch.allclose(logits, llama()(input_ids=prompt(5)).logits, atol=1e-6)
        assert not reference.training and reference.zero_optimization_stage() == (3 if stage == 3 else 0)


@distributed(world_size=2)
def test_online_trainer_generates_while_training(tmp_path: Path) -> None:
    """GRPO at stage 3: generation, a reward, a step, in turn."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count("a")) for text in completions]

    prompts = Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 3]) for i in range(16)]})
    with clean_clients():
        settings = options(tmp_path, 3, max_steps=2, per_device_train_batch_size=4)
        if torch.distributed.get_rank() == 0:
            llama().save_pretrained(tmp_path / "base")
        torch.distributed.barrier()
        run = GRPOTrainer(
            model=str(tmp_path / "base"),  # policy and reference are both loaded under zero.Init
            reward_funcs=reward,
            args=GRPOConfig(**settings, num_generations=4, max_completion_length=6, beta=0.05),
            train_dataset=prompts,
            processing_class=tokenizer(),
        )
        run.train()
        assert len(history(run)) == 2 and all(value == value for value in history(run))

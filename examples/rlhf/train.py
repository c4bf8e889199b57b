"""Learning from preferences, from a model to a chat: SFT, a reward model, PPO, and then GRPO, RLOO and DPO.

    python examples/rlhf/train.py                                # a small model and a toy task, about two minutes
    python examples/rlhf/train.py --chat                         # and talk to the result
    deepspeed --num_gpus 2 examples/rlhf/train.py --actor_zero_stage 3 --critic_zero_stage 2 --enable_ema
    python examples/rlhf/train.py --model_name_or_path FOLDER --data_path ROWS.jsonl --reward_function FILE.py:NAME

PPO has four models, each in an engine of its own; the actor's engine also generates. The toy task is scored by a
program (task.py), which GRPO and RLOO take as their reward, and by which all curves are drawn: OUTPUT/curves.svg.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import supervised
import task
import torch
from flags import arguments
from models import (
    ScoredModel,
    encode_prompts,
    load_policy,
    load_tokenizer,
    save_policy,
    save_scored,
    small_model,
    with_adapters,
    word_tokenizer,
)
from online import Online
from picture import draw
from transformers.utils import logging as transformers_logging

import deepspeed

ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29517",
}


class Steps:
    """The steps, each from the folder that another one wrote."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.is_first = torch.distributed.get_rank() == 0
        self.rows = task.read(options.data_path, 512, options.seed)
        self.score = scoring(options.reward_function)
        self.sft, self.reward = options.output_dir / "sft", options.output_dir / "reward"
        self.dtype = torch.float64 if options.dtype == "fp64" else torch.float32
        if options.num_train_epochs is not None:
            passes = self._steps_of(options.per_device_train_batch_size * options.gradient_accumulation_steps)
            options.sft_steps = options.reward_steps = options.dpo_steps = passes
        if options.model_name_or_path is None:
            self.tokenizer = word_tokenizer(task.WORDS)
        else:
            self.tokenizer = load_tokenizer(options.model_name_or_path)

    def _steps_of(self, count: int) -> int:
        """That --num_train_epochs takes, with ``count`` rows of each rank in a step; what is left over in a pass is
        not seen in it."""
        everyone = count * torch.distributed.get_world_size()
        return self.options.num_train_epochs * max(1, len(self.rows) // everyone)

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def _run(self, name: str, engine: Any, loss: Callable[[int], Any], steps: int) -> None:
        folder = self.options.output_dir / f"{name.lower().replace(' ', '_')}_checkpoint"
        seen = supervised.run(engine, loss, steps, folder, self.options)
        tenth = max(1, len(seen) // 10)
        self.say(f"{name}: loss {sum(seen[:tenth]) / tenth:.4f} -> {sum(seen[-tenth:]) / tenth:.4f}")

    def demonstrate(self) -> None:
        """Step 1."""
        options = self.options
        path = options.model_name_or_path
        if path is None:
            model = small_model(self.tokenizer, self.dtype)
        else:
            model = load_policy(path, dtype=self.dtype)
        model = with_adapters(model, options.lora_dim if path else 0, options.only_optimize_lora)
        engine = engines.trained(
            model,
            options,
            stage=options.zero_stage,
            lr=options.learning_rate,
            rows=options.per_device_train_batch_size,
        )
        loss = supervised.demonstrations(engine, self.tokenizer, self.rows, options)
        self._run("SFT", engine, loss, options.sft_steps)
        save_policy(engine, self.tokenizer, self.sft)
        engine.destroy()

    def prefer(self) -> None:
        """Step 2."""
        options = self.options
        engine = engines.trained(
            ScoredModel.load(options.critic_model_name_or_path or self.sft, dtype=self.dtype),
            options,
            stage=options.zero_stage,
            lr=options.reward_learning_rate,
            rows=options.per_device_train_batch_size,
        )
        loss = supervised.preferences(engine, self.tokenizer, self.rows, options)
        self._run("reward model", engine, loss, options.reward_steps)
        held_out = task.read(options.data_path, 64, options.seed + 1)
        right = supervised.accuracy(engine, self.tokenizer, held_out, options)
        self.say(f"reward model: the better of two answers in {100 * right:.0f} % of pairs")
        save_scored(engine, self.reward)
        engine.destroy()

    def _actor(self, micro_batches: int) -> Any:
        options = self.options
        policy = load_policy(self.sft, options.actor_dropout, self.dtype)
        return engines.trained(
            with_adapters(policy, options.lora_dim, options.only_optimize_lora),
            options,
            stage=options.actor_zero_stage,
            lr=options.actor_learning_rate,
            rows=options.per_device_training_batch_size,
            role="actor",
            micro_batches=micro_batches,
        )

    def _reference(self) -> Any:
        options = self.options
        return engines.frozen(
            load_policy(self.sft, dtype=self.dtype),
            options,
            stage=options.actor_zero_stage,
            offload=options.offload or options.offload_reference_model,
        )

    def direct(self) -> Path:
        """Step 3 without rollouts: DPO."""
        options = self.options
        batches = options.dpo_steps * options.gradient_accumulation_steps
        engine, reference = self._actor(batches), self._reference()
        loss = supervised.direct_preferences(engine, reference, self.tokenizer, self.rows, options)
        self._run("DPO", engine, loss, options.dpo_steps)
        folder = options.output_dir / "dpo"
        save_policy(engine, self.tokenizer, folder)
        for each in (engine, reference):
            each.destroy()
        return folder

    def online(self, kind: str) -> tuple[Path, list[dict[str, float]]]:
        """Step 3: the model learns from its own answers."""
        options = self.options
        if options.num_train_epochs is not None:
            answers = 1 if kind == "ppo" else options.num_answers
            options.iterations = self._steps_of(options.per_device_generation_batch_size // answers)
        parts = options.per_device_generation_batch_size // options.per_device_training_batch_size
        micro_batches = options.iterations * options.ppo_epochs * parts
        made: dict[str, Any] = {"actor": self._actor(micro_batches), "reference": self._reference()}
        if kind == "ppo":
            critic = ScoredModel.load(self.reward, options.critic_dropout, self.dtype)
            made["critic"] = engines.trained(
                with_adapters(critic, options.critic_lora_dim, options.only_optimize_lora),
                options,
                stage=options.critic_zero_stage,
                lr=options.critic_learning_rate,
                rows=options.per_device_training_batch_size,
                role="critic",
                micro_batches=micro_batches,
            )
            made["reward"] = engines.frozen(
                ScoredModel.load(self.reward, dtype=self.dtype), options, stage=options.critic_zero_stage
            )
        if options.enable_ema:
            policy = load_policy(self.sft, dtype=self.dtype)
            average = with_adapters(policy, options.lora_dim, options.only_optimize_lora)
            made["average"] = engines.frozen(average, options, stage=options.actor_zero_stage)
            engines.follow(made["average"], made["actor"], 0.0)
        learning = Online(kind, options, self.tokenizer, self.rows, self.score, **made)
        self._learn(learning, options.output_dir / f"{kind}_checkpoint")
        learning.close()
        folder = options.output_dir / kind
        save_policy(made["actor"], self.tokenizer, folder)
        if options.enable_ema:
            save_policy(made["average"], self.tokenizer, options.output_dir / f"{kind}_ema")
        for each in made.values():
            each.destroy()
        return folder, learning.curve

    def _learn(self, learning: Online, checkpoint: Path) -> None:
        options = self.options
        if options.resume and checkpoint.exists():
            learning.load(checkpoint)
        done = 0
        while learning.iteration < options.iterations:
            learning.step()
            done += 1
            if options.save_interval and done % options.save_interval == 0:
                learning.save(checkpoint)
        curve = learning.curve
        seconds = [sum(point.get(name, 0.0) for point in curve) for name in ("rollout_s", "training_s")]
        tokens = sum(point["rollout_s"] * point["rollout_tokens_per_s"] for point in curve)
        self.say(
            f"{learning.kind.upper()}: score {curve[0]['reward']:.3f} -> {curve[-1]['reward']:.3f}, "
            f"KL {curve[-1]['kl']:.2f}; rollouts {seconds[0]:.1f} s ({tokens / max(seconds[0], 1e-9):.0f} tokens/s), "
            f"training {seconds[1]:.1f} s; rollout and training differ by "
            f"{max(point['rollout_mismatch'] for point in curve):.1e} in a log-probability at most"
        )


def scoring(where: str | None) -> Callable[[str, str], float]:
    if where is None:
        return task.score
    path, _, name = where.rpartition(":")
    spec = importlib.util.spec_from_file_location("reward_function", path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def chat(folder: Path, typed: bool, questions: list[str], lead: int) -> None:
    """Dialogues with the model in ``folder``: with who sits there, or with ``questions``."""
    model, tokenizer = load_policy(folder).eval(), load_tokenizer(folder)

    def answer(question: str) -> str:
        given = encode_prompts(tokenizer, [question], "cpu", lead)
        made = model.generate(
            given["tokens"],
            attention_mask=given["mask"],
            max_new_tokens=32,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        return tokenizer.decode(made[0, given["tokens"].shape[1] :], skip_special_tokens=True)

    for question in questions:
        print(f"{question} {answer(question)}")
    while typed:
        try:
            line = input("Human: ").strip()
        except EOFError:
            break
        if line in ("", "quit", "exit"):
            break
        print(f"Assistant: {answer(f'Human: {line} Assistant:')}", flush=True)


def main(given: list[str] | None = None) -> dict[str, list[dict[str, float]]]:
    """The curves of what was run."""
    options = arguments(__doc__, given)
    if options.local_rank < 0:
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    deepspeed.init_distributed()
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    steps = Steps(options)
    steps.demonstrate()
    if "ppo" in options.run:
        steps.prefer()
    curves, result = {}, steps.sft
    for kind in options.run:
        if kind == "dpo":
            folder = steps.direct()
        else:
            folder, curves[kind] = steps.online(kind)
        result = folder if result == steps.sft else result
    if steps.is_first:
        if curves:
            draw(curves, options.output_dir / "curves.svg")
            (options.output_dir / "curves.json").write_text(json.dumps(curves, indent=1))
        print(
            f"done in {time.perf_counter() - began:.0f} s; models and curves.svg are in {options.output_dir}"
        )
        questions = [row["prompt"] for row in steps.rows[:3]]
        chat(result, options.chat, questions, options.num_padding_at_beginning)
    return curves


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    torch.distributed.destroy_process_group()

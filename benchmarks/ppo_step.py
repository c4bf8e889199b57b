"""Time of a PPO step with four models: that of examples/rlhf on our engines, the same on DeepSpeed's, whose plain way
to answer at stage 3 is the engine's module, and TRL's trainer under DDP.

A step answers prompts, asks the reference, the critic and the reward model about the answers, and trains actor and
critic on them. All rows have the same models, prompts and lengths; no answer ends before its length. TRL's newest
releases have no PPO any more: --trl names an environment of its own, with trl==0.21.0 and transformers==4.55.4, and
--peer one with DeepSpeed and our release of transformers.

    ../clients/bin/python benchmarks/ppo_step.py --trl ../ppo/bin/python --peer ../clients_peer/bin/python --save cpu
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from jobs import FOLDER, OURS, Contender, round_robin, started
from report import Report
from trl_step import compared, parsed, policy, prompts, step_arguments, tokenizer

GOAL = 2.0  # times TRL's step
PLAIN_GOAL = 5.0  # times the step that answers with the module of DeepSpeed's engine at stage 3
TRL = "TRL, DDP"
PLAIN = "DeepSpeed, stage 3, module"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = step_arguments("Time of a PPO step with four models.", "answers per rank and step")
    parser.add_argument("--epochs", type=int, default=1, help="over the answers of a step")
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter of the environment with TRL")
    return parsed(parser, argv)


class EngineRank:
    """One rank of the third step of examples/rlhf, on the DeepSpeed of its environment."""

    def __init__(
        self, stage: int, hybrid: bool, size: str, rows: int, prompt: int, tokens: int, epochs: int
    ) -> None:
        import transformers

        import deepspeed
        from deepspeed.runtime import rollout

        sys.path.append(str(FOLDER.parent / "examples" / "rlhf"))
        import engines
        import flags
        from models import ScoredModel

        for name in ("importance_weights", "rollout_mismatch"):  # of ours alone
            if not hasattr(rollout, name):
                setattr(rollout, name, lambda *given, **options: {"largest": 0.0})
        from online import Online

        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        transformers.logging.set_verbosity_error()
        deepspeed.init_distributed("gloo")
        given = {
            "--per_device_generation_batch_size": rows,
            "--per_device_training_batch_size": rows,
            "--max_prompt_seq_len": prompt,
            "--max_answer_seq_len": tokens,
            "--ppo_epochs": epochs,
            "--actor_zero_stage": stage,
            "--critic_zero_stage": stage,
            "--unsup_coef": 0,
        }
        chosen = [f"{name}={value}" for name, value in given.items()]
        options = flags.arguments(None, [*chosen, *([] if hybrid else ["--no-enable_hybrid_engine"])])

        def trained(role: str, model: Any) -> Any:
            return engines.trained(model, options, stage=stage, lr=1e-5, rows=rows, role=role)

        self.learning = Online(
            "ppo",
            options,
            tokenizer(padding_side="left"),
            [{"prompt": text, "chosen": text} for text in prompts(prompt)],
            lambda question, answer: 0.0,
            actor=trained("actor", policy(size)),
            reference=engines.frozen(policy(size), options, stage=stage),
            critic=trained("critic", ScoredModel(policy(size).model)),
            reward=engines.frozen(ScoredModel(policy(size).model), options, stage=stage),
        )
        self.tokens = tokens

    def run(self, steps: int) -> float:
        """Seconds per step."""
        self._step()
        torch.distributed.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        torch.distributed.barrier()
        assert self.learning.curve[-1]["length"] == self.tokens
        return (time.perf_counter() - begin) / steps

    def _step(self) -> None:
        iteration = self.learning.iteration
        while self.learning.iteration == iteration:
            self.learning.step()


class TRLRank:
    """One rank of TRL's PPO trainer; runs in the peer's environment."""

    def __init__(self, size: str, rows: int, prompt: int, tokens: int, epochs: int) -> None:
        import transformers

        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        transformers.logging.set_verbosity_error()
        torch.distributed.init_process_group("gloo")
        self.size, self.rows, self.prompt, self.tokens, self.epochs = size, rows, prompt, tokens, epochs
        self.words = tokenizer(padding_side="left")

    def run(self, steps: int) -> float:
        """Seconds per step of a training of its own."""
        from transformers import TrainerCallback

        class Times(TrainerCallback):
            def __init__(self) -> None:
                self.ends: list[float] = []

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                torch.distributed.barrier()
                self.ends.append(time.perf_counter())

        times, trainer = Times(), self._trainer(steps + 1)
        trainer.add_callback(times)
        trainer.train()
        assert len(times.ends) == steps + 1, times.ends
        return (times.ends[-1] - times.ends[0]) / steps

    def _trainer(self, steps: int) -> Any:
        from datasets import Dataset
        from transformers import LlamaForSequenceClassification

        # By name: this release is older than the one that types are checked with.
        trl: Any = importlib.import_module("trl")
        model = policy(self.size)
        config = copy.deepcopy(model.config)
        config.num_labels = 1
        torch.manual_seed(1)
        critic, reward = (LlamaForSequenceClassification(config) for _ in range(2))
        arguments = trl.PPOConfig(
            output_dir=tempfile.mkdtemp(prefix="ppo_step_"),
            use_cpu=True,
            per_device_train_batch_size=self.rows,
            gradient_accumulation_steps=1,
            num_mini_batches=1,
            num_ppo_epochs=self.epochs,
            local_rollout_forward_batch_size=self.rows,
            response_length=self.tokens,
            total_episodes=steps * self.rows * torch.distributed.get_world_size(),
            num_sample_generations=0,
            learning_rate=1e-5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
        )
        rows = [self.words(text).input_ids for text in prompts(self.prompt)]
        return trl.PPOTrainer(
            args=arguments,
            processing_class=self.words,
            model=model,
            ref_model=policy(self.size),
            reward_model=reward,
            value_model=critic,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
        )


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    shared = {name: getattr(arguments, name) for name in ("size", "rows", "prompt", "tokens", "epochs")}

    def engine(name: str, stage: int, *, hybrid: bool, python: str = OURS) -> Contender:
        options = {**shared, "stage": stage, "hybrid": hybrid}
        return Contender(name, "ppo_step:EngineRank", options, python=python, goal=GOAL if hybrid else None)

    found = []
    if arguments.trl:
        found.append(Contender(TRL, "ppo_step:TRLRank", shared, python=arguments.trl))
    if arguments.peer:
        found.append(engine(PLAIN, 3, hybrid=False, python=arguments.peer))
    found += [engine(f"ours, stage {stage}", stage, hybrid=True) for stage in arguments.stages]
    return [*found, engine("ours, stage 3, module", 3, hybrid=False)]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("ppo_step", arguments)
    rows = contenders(arguments)
    with started(rows) as jobs:
        seconds = round_robin(jobs, arguments.rounds, lambda job: max(job.call("run", steps=arguments.steps)))
    report.data["seconds"] = seconds
    report.table(
        f"PPO, four {arguments.size} Llamas, fp32, 2 ranks, {arguments.rows} answers each of {arguments.tokens} tokens "
        f"to prompts of {arguments.prompt}, {arguments.rounds} rounds of {arguments.steps} steps",
        ["", "ms/step", f"x {TRL}, median [min .. max]", "goal", f"x {PLAIN}", "goal"],
        compared(rows, seconds, {TRL: GOAL, PLAIN: PLAIN_GOAL}),
    )
    report.save()


if __name__ == "__main__":
    main()

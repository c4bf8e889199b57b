"""Step time of TRL's GRPO trainer, unchanged: under torch's DDP, with our engine, and with our rollouts by continuous
batching.

A step answers prompts, scores the answers, and learns from them with a reference model for the divergence. Every row
has the same models, prompts and lengths; answers have no end, so that all are equally long.

    ../clients/bin/python benchmarks/trl_step.py --save cpu
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from jobs import Contender, Spread, ratios, round_robin, started
from report import Report, common_arguments
from rollouts import SIZES, VOCABULARY, llama

GOAL = 2.0  # times TRL under DDP
SPECIAL = ("<pad>", "<s>", "<unk>")
COUNT = 64  # prompts
END = VOCABULARY  # no token of the model: no answer ends before its length


def step_arguments(description: str, rows: str) -> argparse.ArgumentParser:
    """Of a step in which answers are made and learned from; ``rows``: what is said about their number."""
    parser = common_arguments(description)
    parser.add_argument("--size", default="15M", choices=list(SIZES))
    parser.add_argument("--rows", type=int, default=8, help=rows)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=3, help="of a round; one more comes before, not counted")
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.size, arguments.tokens, arguments.rounds, arguments.steps = "tiny", 8, 1, 1
    return arguments


def policy(size: str) -> Any:
    return llama(size, pad_token_id=0, bos_token_id=1, eos_token_id=END)


def prompts(length: int) -> list[str]:
    draw = torch.Generator().manual_seed(2)
    words = torch.randint(len(SPECIAL), VOCABULARY, (COUNT, length), generator=draw)
    return [" ".join(f"w{word}" for word in row) for row in words.tolist()]


class TRLRank:
    """One rank of TRL's trainer; ``system``: ddp, engine, or serving (our engine and our rollouts)."""

    def __init__(self, system: str, stage: int, size: str, rows: int, prompt: int, tokens: int) -> None:
        import transformers
        from accelerate.state import PartialState

        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        transformers.logging.set_verbosity_error()
        self.system, self.stage, self.rows, self.tokens = system, stage, rows, tokens
        if system == "ddp":
            torch.distributed.init_process_group("gloo")
        else:  # without a GPU, Accelerate has to be told the backend
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
            del os.environ["ACCELERATE_USE_DEEPSPEED"]
        first = torch.distributed.get_rank() == 0
        place = [tempfile.mkdtemp(prefix="trl_step_") if first else ""]
        torch.distributed.broadcast_object_list(place)
        self.folder = Path(place[0])
        self.tokenizer = tokenizer()
        model = policy(size)
        if first:
            model.save_pretrained(self.folder / "base")
        torch.distributed.barrier()
        self.prompts = prompts(prompt)

    def run(self, steps: int) -> float:
        """Seconds per step of a training of its own."""
        from accelerate.state import AcceleratorState, GradientState
        from transformers import TrainerCallback

        AcceleratorState._reset_state()  # what the trainer before has left
        GradientState._reset_state()

        class Times(TrainerCallback):
            def __init__(self) -> None:
                self.ends: list[float] = []

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                torch.distributed.barrier()
                self.ends.append(time.perf_counter())

        times = Times()
        trainer = self.trainer(steps + 1)
        trainer.add_callback(times)
        trainer.train()
        lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
        assert lengths and min(lengths) == self.tokens, lengths
        return (times.ends[-1] - times.ends[0]) / steps

    def trainer(self, steps: int) -> Any:
        import trl
        from datasets import Dataset

        config = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": self.stage},
            "native_products": {"enabled": True},
            "steps_per_print": 1_000_000,
        }
        ours = self.system != "ddp"
        more: dict[str, Any] = {}
        if self.system == "serving":
            from deepspeed.engine.rollout.for_trl import rollouts_for_trl

            more["rollout_func"] = rollouts_for_trl()
        arguments = trl.GRPOConfig(
            output_dir=str(self.folder / "out"),
            deepspeed=config if ours else None,
            accelerator_config={"use_configured_state": True} if ours else None,
            use_cpu=not ours,
            per_device_train_batch_size=self.rows,
            num_generations=4,
            max_completion_length=self.tokens,
            beta=0.05,
            learning_rate=1e-5,
            max_steps=steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
        )
        return trl.GRPOTrainer(
            model=str(self.folder / "base"),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": self.prompts}),
            processing_class=self.tokenizer,
            **more,
        )


def reward(completions: list[str], **_: Any) -> list[float]:
    """Different words of an answer, as a share."""
    return [len(set(text.split())) / max(1, len(text.split())) for text in completions]


def tokenizer(padding_side: str = "right") -> Any:
    """Words between spaces; nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCABULARY)), "</s>"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side=padding_side,
    )


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    shared = {name: getattr(arguments, name) for name in ("size", "rows", "prompt", "tokens")}
    found = [("TRL, DDP", "ddp", 0)]
    for stage in arguments.stages:
        found += [(f"TRL on our engine, stage {stage}", "engine", stage)]
        found += [(f"TRL on our engine and rollouts, stage {stage}", "serving", stage)]
    return [
        Contender(
            name,
            "trl_step:TRLRank",
            {**shared, "system": system, "stage": stage},
            goal=GOAL if system == "serving" else None,
        )
        for name, system, stage in found
    ]


def compared(
    contenders: Sequence[Contender], seconds: dict[str, list[float]], goals: Mapping[str, float]
) -> list[list[str]]:
    """A row for each: time of a step, and how many times as fast as each of ``goals`` it is, beside the goal if it has
    one. A cell is empty if that one did not run."""
    table = []
    for each in contenders:
        line = [each.name, f"{Spread.of(seconds[each.name]).median * 1e3:.0f}"]
        for base, goal in goals.items():
            has_goal = base in seconds and each.goal is not None
            shown = ratios(seconds[base], seconds[each.name]).show() if base in seconds else ""
            line += [shown, f">= {goal:g}" if has_goal else ""]
        table.append(line)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = step_arguments(__doc__ or "", "answers per rank and step, four to each prompt")
    arguments = parsed(parser, argv)
    report = Report("trl_step", arguments)
    rows = contenders(arguments)
    with started(rows) as jobs:
        seconds = round_robin(jobs, arguments.rounds, lambda job: max(job.call("run", steps=arguments.steps)))
    report.data["seconds"] = seconds
    report.table(
        f"GRPO, {arguments.size} Llama, fp32, 2 ranks, {arguments.rows} answers each of {arguments.tokens} tokens to "
        f"prompts of {arguments.prompt}, {arguments.rounds} rounds of {arguments.steps} steps",
        ["", "ms/step", "x TRL under DDP, median [min .. max]", "goal"],
        compared(rows, seconds, {rows[0].name: GOAL}),
    )
    report.save()


if __name__ == "__main__":
    main()

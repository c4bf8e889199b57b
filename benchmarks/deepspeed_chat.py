"""The three steps of DeepSpeed-Chat by its own scripts, unchanged: fine-tuning, reward model, PPO with four models.

--scripts is the folder applications/DeepSpeed-Chat of a checkout of DeepSpeedExamples; it is copied, not written to.
All runs begin from the same small OPT, take the same rows (the toy task of examples/rlhf, as the file behind the
scripts' data_path local/jsonfile), and are compared by what the scripts print. With --peer some are repeated there; the
hybrid engine is not, which DeepSpeed has for GPUs only.

The scripts need transformers before 5 (they pass head_mask and from_tf), datasets and tensorboard, in both
environments.

    ../chat/bin/python benchmarks/deepspeed_chat.py --scripts ../DeepSpeedExamples/applications/DeepSpeed-Chat \\
        --peer ../chat_peer/bin/python --save cpu
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from jobs import FOLDER, OURS, free_port, progress
from report import Report, common_arguments

HYBRID = "--enable_hybrid_engine"
STEPS = "step1_supervised_finetuning", "step2_reward_model_finetuning", "step3_rlhf_finetuning"
PRINTED = (
    re.compile(r"^ppl: ([\d.]+)", re.M),
    re.compile(r"acc \(higher is better\) : ([\d.]+)"),
    re.compile(r"Average reward score: (-?[\d.]+)"),
)
"""By step: perplexity, share of pairs in the right order, mean score of a batch of answers."""


@dataclass(frozen=True)
class Setting:
    """``flags`` of the first two steps, ``ppo`` those of the third one. ``compared``: with a peer."""

    name: str
    stage: int
    flags: tuple[str, ...] = ()
    ppo: tuple[str, ...] = ()
    dtype: str = "bf16"
    compared: bool = False


LORA = "--lora_dim=4", "--only_optimize_lora", "--lora_learning_rate=1e-2"
PPO_LORA = "--actor_lora_dim=4", "--critic_lora_dim=4", "--only_optimize_lora"
SETTINGS = [
    Setting("stage 0", 0),
    Setting("stage 2", 2, compared=True),
    Setting("stage 3", 3, compared=True),
    Setting(
        "stage 2, EMA, fp32 losses", 2, ("--compute_fp32_loss",), ("--compute_fp32_loss", "--enable_ema")
    ),
    Setting("stage 2, hybrid engine", 2, ppo=(HYBRID,)),
    Setting("stage 3, hybrid engine, EMA", 3, ppo=(HYBRID, "--enable_ema", "--release_inference_cache")),
    Setting("stage 3, hybrid engine over 2 ranks", 3, ppo=(HYBRID, "--inference_tp_size=2")),
    Setting("stage 3, offload", 3, ("--offload",), ("--offload", "--offload_reference_model")),
    Setting("stage 2, adapters", 2, LORA, PPO_LORA),
    Setting("stage 3, adapters, hybrid engine", 3, LORA, (*PPO_LORA, HYBRID)),
    Setting("stage 3, adapters, int8 base", 3, LORA, (*PPO_LORA, HYBRID, "--enable_mixed_precision_lora")),
    Setting(
        "stage 2, checkpointing",
        2,
        ("--gradient_checkpointing",),
        ("--actor_gradient_checkpointing", "--critic_gradient_checkpointing"),
    ),
    Setting("stage 2, fp16, aligned overflow", 2, ppo=("--align_overflow",), dtype="fp16", compared=True),
]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("The three steps of DeepSpeed-Chat by its own scripts.")
    parser.add_argument(
        "--scripts", required=True, type=Path, metavar="FOLDER", help="applications/DeepSpeed-Chat"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rows", type=int, default=300, help="of the data, of which the steps take 4 : 3 : 3"
    )
    parser.add_argument("--only", metavar="WORD", help="settings with this in their name")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rows, arguments.only = 80, arguments.only or "stage 3, hybrid engine, EMA"
    return arguments


class Scripts:
    """A copy of the scripts, with data, and a model to begin with."""

    def __init__(self, source: Path, folder: Path, rows: int) -> None:
        self.folder = folder
        self.chat = folder / "chat"
        shutil.copytree(source, self.chat, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        sys.path.append(str(FOLDER.parent / "examples" / "rlhf"))
        import task

        data = self.chat / "data"
        data.mkdir(exist_ok=True)
        texts = {"train": task.rows(rows, 1), "eval": task.rows(max(rows // 5, 40), 2)}
        for name, found in texts.items():
            lines = [json.dumps({key: row[key] for key in ("prompt", "chosen", "rejected")}) for row in found]
            (data / f"{name}.json").write_text("\n".join(lines))
        small_opt(folder / "model", [f"{row['prompt']} {row['chosen']}" for row in texts["train"]])

    def run(self, python: str, ranks: int, setting: Setting, output: Path) -> list[list[float]]:
        """What each step printed, up to one that failed, whose log is in ``output``."""
        output.mkdir(parents=True)
        found: list[list[float]] = []
        for number in range(len(STEPS)):
            printed = self._step(number, python, ranks, setting, output)
            if not printed:
                break
            found.append(printed)
        return found

    def _step(self, number: int, python: str, ranks: int, setting: Setting, output: Path) -> list[float]:
        command = [
            *(python, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)),
            *("--master_port", str(free_port()), "main.py"),
            *self._flags(number, setting, output),
        ]
        done = subprocess.run(
            command,
            cwd=self.chat / "training" / STEPS[number],
            env=environment(python, self.chat),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        (output / f"{STEPS[number]}.log").write_text(done.stdout)
        if done.returncode:
            print(f"{setting.name}: {STEPS[number]} failed\n{done.stdout[-4000:]}", file=sys.stderr)
            return []
        return [float(value) for value in PRINTED[number].findall(done.stdout)]

    def _flags(self, number: int, setting: Setting, output: Path) -> list[str]:
        shared = {
            "--data_path": "local/jsonfile",
            "--data_split": "4,3,3",
            "--data_output_path": output,
            "--seed": 1234,
            "--num_warmup_steps": 0,
            "--dtype": setting.dtype,
            "--output_dir": output / STEPS[number],
        }
        supervised = {
            "--per_device_train_batch_size": 4,
            "--per_device_eval_batch_size": 4,
            "--max_seq_len": 48,
            "--zero_stage": setting.stage,
        }
        fine_tuned, reward = output / STEPS[0], output / STEPS[1]
        own = (
            {
                **supervised,
                "--model_name_or_path": self.folder / "model",
                "--learning_rate": 3e-3,
                "--num_train_epochs": 3,
            },
            {
                **supervised,
                "--model_name_or_path": fine_tuned,
                "--num_padding_at_beginning": 1,
                "--learning_rate": 1e-3,
                "--num_train_epochs": 2,
            },
            {
                "--actor_model_name_or_path": fine_tuned,
                "--critic_model_name_or_path": reward,
                "--per_device_generation_batch_size": 4,
                "--per_device_training_batch_size": 4,
                "--max_prompt_seq_len": 24,
                "--max_answer_seq_len": 16,
                "--actor_learning_rate": 1e-4,
                "--critic_learning_rate": 1e-4,
                "--num_train_epochs": 2,
                "--actor_zero_stage": setting.stage,
                "--critic_zero_stage": setting.stage,
            },
        )[number]
        more = setting.flags if number < 2 else setting.ppo
        return [*(f"{name}={value}" for name, value in {**shared, **own}.items()), *more]


def environment(python: str, chat: Path) -> dict[str, str]:
    package = str(FOLDER.parent) if python == OURS else ""
    return {
        **os.environ,
        "PYTHONPATH": f"{chat}{os.pathsep}{package}".rstrip(os.pathsep),
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # the scripts read what they pickled with torch.load's old default
    }


def small_opt(folder: Path, texts: list[str]) -> None:
    """Two random layers, and a tokenizer learned from ``texts``."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2TokenizerFast, OPTConfig, OPTForCausalLM

    folder.mkdir()
    words = ByteLevelBPETokenizer()
    words.train_from_iterator(texts, vocab_size=400, special_tokens=["<s>", "<pad>", "</s>"])
    words.save_model(str(folder))
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    tokenizer = GPT2TokenizerFast(*files, pad_token="<pad>", **ends)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        dropout=0.0,
        attention_dropout=0.0,
    )
    OPTForCausalLM(config).save_pretrained(folder)


def row(name: str, found: list[list[float]]) -> list[str]:
    perplexity, accuracy, rewards = [*found, [], [], []][:3]
    tenth = max(1, len(rewards) // 10)
    cells = [
        *[f"{value:.4g}" for value in perplexity[:: max(1, len(perplexity) - 1)]],
        *[f"{value:.3f}" for value in accuracy[-1:]],
        *[f"{sum(part) / tenth:.3f}" for part in (rewards[:tenth], rewards[-tenth:]) if part],
    ]
    failed = [] if len(found) == len(STEPS) else ["fails"]
    return [name, *cells, *failed, *["-"] * (5 - len(cells) - len(failed))]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("deepspeed_chat", arguments)
    settings = [each for each in SETTINGS if arguments.only is None or arguments.only in each.name]
    pythons = {"ours": OURS} | ({"DeepSpeed": arguments.peer} if arguments.peer else {})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scripts = Scripts(arguments.scripts, Path(folder), arguments.rows)
        for number, setting in enumerate(settings):
            for who, python in pythons.items():
                if who == "ours" or setting.compared:
                    progress(f"{setting.name} ({number + 1} of {len(settings)}), {who}")
                    output = Path(folder) / f"{number}_{who}"
                    found = scripts.run(python, arguments.ranks, setting, output)
                    rows.append(row(f"{setting.name}: {who}", found))
                    report.data[rows[-1][0]] = found
    names = ["run", "perplexity before", "after", "accuracy", "reward at first", "at last"]
    report.table(f"DeepSpeed-Chat's scripts on {arguments.ranks} ranks", names, rows)
    report.save()
    if any("fails" in cells for cells in rows if cells[0].endswith("ours")):
        raise SystemExit("not all runs came to their end")


if __name__ == "__main__":
    main()

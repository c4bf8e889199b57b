"""The flags of the example: those of DeepSpeed-Chat's scripts, and a few of its own."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

KINDS = ("ppo", "grpo", "rloo", "dpo")
SCHEDULES = ("constant", "linear", "cosine")


def arguments(description: str | None, given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for add_group in (_models_and_data, _supervised, _online, _engines, _generation):
        add_group(parser)
    options = parser.parse_args(given)
    for role in ("actor", "critic"):  # what is not said of one model is what is said of all
        for name in ("weight_decay", "gradient_checkpointing"):
            own = f"{role}_{name}"
            if getattr(options, own) is None:
                setattr(options, own, getattr(options, name))
    return options


def _models_and_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model_name_or_path",
        "--actor_model_name_or_path",
        type=Path,
        help="a folder of save_pretrained; default: a small new model",
    )
    add(
        "--critic_model_name_or_path",
        type=Path,
        help="what the reward model begins from; default: the result of SFT",
    )
    add(
        "--data_path",
        type=Path,
        help="JSON lines: prompt, chosen, rejected, and demonstration if there is one",
    )
    add(
        "--unsupervised_dataset_name",
        type=Path,
        help="a text file, a sample per line, for the mixture of --unsup_coef; default: the demonstrations",
    )
    add(
        "--reward_function",
        help="FILE.py:NAME of a function (prompt, answer) -> number; default: the toy task's",
    )
    add("--output_dir", "--output", type=Path, default=Path(tempfile.gettempdir(), "ds_rlhf"))
    add("--run", nargs="*", choices=KINDS, default=list(KINDS), help="after SFT and the reward model")
    add("--chat", action="store_true", help="talk to the result in the terminal")
    add("--print_answers", action="store_true")
    add("--monitor", type=Path, help="a folder for curves as CSV")
    add("--enable_tensorboard", action="store_true", help="the curves for TensorBoard too")
    add("--tensorboard_path", type=Path, default=Path(tempfile.gettempdir(), "ds_rlhf_tensorboard"))
    add("--save_interval", type=int, default=0, help="updates between checkpoints of a step; 0: none")
    add("--resume", action="store_true", help="each step from its last checkpoint")
    add("--seed", type=int, default=1234)
    add(
        "--num_padding_at_beginning",
        type=int,
        default=0,
        help="tokens with which every text of the model begins, and which it sees; OPT: 1",
    )
    add(
        "--num_train_epochs",
        type=int,
        help="passes of each step over the data, in place of --sft_steps, --reward_steps, --dpo_steps, --iterations",
    )
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)


def _supervised(parser: argparse.ArgumentParser) -> None:
    """The first two steps, and DPO."""
    add = parser.add_argument
    add("--zero_stage", type=int, default=2)
    add("--sft_steps", type=int, default=120)
    add("--reward_steps", type=int, default=60)
    add("--dpo_steps", type=int, default=40)
    add("--dpo_beta", type=float, default=0.1)
    add("--per_device_train_batch_size", type=int, default=16)
    add("--learning_rate", type=float, default=3e-3)
    add("--reward_learning_rate", type=float, default=1e-3, help="of the reward model")


def _online(parser: argparse.ArgumentParser) -> None:
    """The third step."""
    add = parser.add_argument
    add("--iterations", type=int, default=25, help="batches of answers")
    add("--generation_batches", type=int, default=1, help="batches of answers between two phases of learning")
    add("--per_device_generation_batch_size", type=int, default=32)
    add("--per_device_training_batch_size", type=int, default=16)
    add("--ppo_epochs", type=int, default=2)
    add(
        "--share_forwards",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="where a batch of answers is learned from once and as a whole, and nothing is dropped out: one forward of "
        "the actor, and one of the critic, for what they say and for learning. Activations of both exist at once",
    )
    add("--num_answers", type=int, default=8, help="to each prompt: GRPO, RLOO")
    add("--max_prompt_seq_len", type=int, default=32)
    add("--max_answer_seq_len", type=int, default=12)
    add("--actor_learning_rate", type=float, default=1e-3)
    add("--critic_learning_rate", type=float, default=1e-3)
    add("--weight_decay", type=float, default=0.0)
    add("--actor_weight_decay", type=float)
    add("--critic_weight_decay", type=float)
    add("--lr_scheduler_type", choices=SCHEDULES, default="constant", help="of the actor and the critic")
    add("--num_warmup_steps", type=int, default=0)
    add("--temperature", type=float, default=1.0)
    add("--kl_coef", type=float, default=0.05)
    add(
        "--missing_eos_penalty", type=float, default=5.0, help="off a reward model's score of what has no end"
    )
    add("--clip_reward", type=float, default=5.0)
    add("--clip_range", type=float, default=0.2)
    add("--clip_value", type=float, default=0.2)
    add("--gamma", type=float, default=1.0)
    add("--lam", type=float, default=0.95)
    add("--unsup_coef", type=float, default=0.05, help="of the loss on demonstrations in the third step")


def _engines(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--actor_zero_stage", type=int, default=2)
    add("--critic_zero_stage", type=int, default=2)
    add("--offload", action="store_true", help="optimizer states in host memory")
    add("--offload_reference_model", action="store_true")
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16", "fp64"),
        default="fp32",
        help="fp64: to compare runs, whose rounding is then too small to change a token",
    )
    add(
        "--native_products",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="faster fp32 products on processors where torch's use half of the vectors",
    )
    add(
        "--gradient_accumulation_steps",
        type=int,
        default=1,
        help="batches of a rank in an update, in all steps",
    )
    add(
        "--wide_sums",
        action="store_true",
        help="gradients are summed in fp64: the same bits on any number of ranks, where batches of a rank have one "
        "size and --gradient_accumulation_steps makes up for the ranks",
    )
    add("--gradient_checkpointing", action="store_true")
    add("--actor_gradient_checkpointing", action="store_true", default=None)
    add("--critic_gradient_checkpointing", action="store_true", default=None)
    add("--actor_dropout", type=float, help="default: as the model's config says")
    add("--critic_dropout", type=float)
    add("--actor_lora_dim", "--lora_dim", dest="lora_dim", type=int, default=0)
    add("--critic_lora_dim", type=int, default=0)
    add("--only_optimize_lora", action="store_true", help="and the head of the critic")
    add("--enable_ema", action="store_true", help="an average of the actor's weights, which is saved too")
    add("--ema_beta", type=float, default=0.95)


def _generation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--enable_hybrid_engine", action=argparse.BooleanOptionalAction, default=True)
    add("--inference_tp_size", type=int, default=1)
    add("--tp_gather_partition_size", type=int, default=8)
    add("--unpin_actor_parameters", action="store_true")
    add("--release_inference_cache", action="store_true")
    add(
        "--rollout_engine",
        choices=("hybrid_engine", "serving", "serving_ahead"),
        default="hybrid_engine",
        help="generate() of the model, continuous batching, or the latter one batch of answers ahead of training",
    )
    add("--importance_cap", type=float, default=2.0, help="of the weights of answers that are behind")

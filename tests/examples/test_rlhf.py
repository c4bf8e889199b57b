"""The example of learning from preferences: its arithmetic against plain loops, and all of its steps in short form."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import distributed
from tests.tools.launcher.programs import COMMAND, REPOSITORY, environment

FOLDER = REPOSITORY / "examples" / "rlhf"


def part(name: str) -> Any:
    """A module of the example, which runs as scripts do: its folder is on the path. Nothing of it stays imported."""
    own = {path.stem for path in FOLDER.glob("*.py")}
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for each in own & set(sys.modules):
            del sys.modules[each]


def ragged() -> tuple[list[list[float]], torch.Tensor]:
    """Random rows, and a mask with answers of other places and lengths."""
    draw = random.Random(0)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]])
    return [[draw.uniform(-1, 1) for _ in range(6)] for _ in range(3)], mask


def test_advantages_against_a_loop() -> None:
    losses = part("losses")
    values, mask = ragged()
    scores, kl, clip, gamma, lam = [0.5, 9.0, -9.0], 0.1, 2.0, 0.9, 0.8
    apart = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    rewards = losses.shaped_rewards(torch.tensor(scores), apart, torch.zeros(3, 6), mask, kl, clip)
    found, returns = losses.advantages_and_returns(torch.tensor(values), rewards, mask, gamma, lam)
    for row in range(3):
        places = [at for at in range(6) if mask[row, at]]
        wanted_rewards = [-kl * apart[row, at].item() for at in places]
        wanted_rewards[-1] += max(-clip, min(clip, scores[row]))
        for start in range(len(places)):  # the sum of its definition, term by term
            wanted = 0.0
            for step in range(start, len(places)):
                after = values[row][places[step + 1]] if step + 1 < len(places) else 0.0
                surprise = wanted_rewards[step] + gamma * after - values[row][places[step]]
                wanted += (gamma * lam) ** (step - start) * surprise
            at = places[start]
            assert found[row, at].item() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert returns[row, at].item() == pytest.approx(wanted + values[row][at], rel=1e-5, abs=1e-6)
        assert (found[row][mask[row] == 0] == 0).all() and (returns[row][mask[row] == 0] == 0).all()


def test_losses_against_a_loop() -> None:
    losses = part("losses")
    rows, mask = ragged()
    now = torch.tensor(rows)
    then, gains = now.roll(1, 0) * 0.7, now.roll(1, 1)
    policy = value = penalty = 0.0
    for row in range(3):
        places = [at for at in range(6) if mask[row, at]]
        for at in places:
            new, old, gain = (each[row, at].item() for each in (now, then, gains))
            ratio = math.exp(new - old)
            policy += max(-gain * ratio, -gain * max(0.8, min(1.2, ratio))) / len(places) / 3
            near = old + max(-0.3, min(0.3, new - old))
            value += 0.5 * max((new - gain) ** 2, (near - gain) ** 2) / len(places) / 3
            penalty += (math.exp(old - new) - (old - new) - 1) / len(places) / 3
    assert losses.clipped_policy_loss(now, then, gains, mask, 0.2).item() == pytest.approx(policy, rel=1e-5)
    assert losses.clipped_value_loss(now, then, gains, mask, 0.3).item() == pytest.approx(value, rel=1e-5)
    assert losses.reference_penalty(now, then, mask).item() == pytest.approx(penalty, rel=1e-5)
    scores = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    assert losses.group_advantages(scores, 3, "rloo").tolist() == pytest.approx(
        [-3, -1.5, 4.5, -1.5, -1.5, 3]
    )
    spread = torch.tensor([1.0, 2.0, 6.0]).std().item() + 1e-4
    assert losses.group_advantages(scores, 3, "grpo")[:3].tolist() == pytest.approx(
        [-2 / spread, -1 / spread, 3 / spread]
    )
    loss, margin = losses.direct_preference_loss(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 3.0]), 0.5)
    assert margin.item() == pytest.approx(1.5) and loss.item() == pytest.approx(math.log1p(math.exp(-1.5)))


def test_padding_and_ends() -> None:
    losses = part("losses")
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert losses.positions_of(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    assert losses.last(mask).tolist() == [3, 2]
    logits, tokens = torch.randn(2, 4, 5), torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    found = losses.token_log_probs(logits, tokens)
    for row in range(2):
        for at in range(3):
            exps = logits[row, at].double().exp()
            wanted = (exps[tokens[row, at + 1]] / exps.sum()).log().item()
            assert found[row, at].item() == pytest.approx(wanted, rel=1e-5)


def test_the_task_scores_what_it_says() -> None:
    task = part("task")
    question = task.prompt("cat")
    assert task.score(question, "gladly the cat is in the box cheers") == 1
    assert task.score(question, "well the dog is in the box duh") == 0
    assert task.score(question, "gladly the cat is in the box cheers cheers") == 0
    rows = task.rows(50)
    assert all(
        task.score(row["prompt"], row["chosen"]) > task.score(row["prompt"], row["rejected"]) for row in rows
    )


SHORT = ["--sft_steps", "30", "--reward_steps", "10", "--dpo_steps", "4", "--iterations", "2"]
SHORT += ["--per_device_train_batch_size", "8", "--max_answer_seq_len", "9"]
SHORT += [
    "--per_device_generation_batch_size",
    "8",
    "--per_device_training_batch_size",
    "4",
    "--num_answers",
    "4",
]


def printed(tmp_path: Path, *command: str, text: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *command, "--output", str(tmp_path)],
        env=environment() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        input=text,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_all_steps_and_a_chat(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    script = str(FOLDER / "train.py")
    (tmp_path / "text.txt").write_text("gladly the cat is in the box cheers\n" * 3)
    more = (
        f"--unsupervised_dataset_name {tmp_path / 'text.txt'} --actor_dropout 0.1 --critic_weight_decay 0.01"
    )
    more += " --lr_scheduler_type cosine --num_warmup_steps 1 --gradient_accumulation_steps 2"
    more += f" --critic_gradient_checkpointing --enable_ema --monitor {tmp_path / 'curves'}"
    text = printed(tmp_path, script, *SHORT, *more.split(), "--chat", text="where is the cat ?\nquit\n")
    for words in (
        "SFT: loss",
        "reward model: the better of",
        "PPO: score",
        "GRPO: score",
        "RLOO: score",
        "DPO: loss",
    ):
        assert words in text
    mismatches = [float(each) for each in re.findall(r"differ by (\S+) in", text)]
    assert len(mismatches) == 3 and max(mismatches) <= 1e-5
    assert "Human: Assistant: " in text  # the chat: a prompt, which waits for a line, and an answer
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == 6
    assert (tmp_path / "ppo_ema" / "model.safetensors").exists()
    names = ("reward", "kl", "length", "entropy", "rollout_mismatch", "rollout_s", "rollout_tokens_per_s")
    for name in (*names, "training_s", "training_tokens_per_s"):  # a line for each batch of answers
        (file,) = (tmp_path / "curves").rglob(f"RLHF_ppo_{name}.csv")
        assert len(file.read_text().splitlines()) == 3


def run(tmp_path: Path, *flags: str) -> dict[str, list[dict[str, float]]]:
    """Run ``main`` of the example, with its own client state."""
    from tests.clients.kit import clean_clients

    with clean_clients(deepspeed_state=False):
        return part("train").main([*SHORT, "--output", str(tmp_path), *flags])


@pytest.mark.parametrize(
    ("kind", "rollout"), [("ppo", "hybrid_engine"), ("grpo", "hybrid_engine"), ("grpo", "serving_ahead")]
)
@distributed(world_size=2)
def test_resumes_between_two_updates_of_a_rollout(tmp_path: Path, kind: str, rollout: str) -> None:
    """The checkpoint is written after the fifth update of eight, the first of four from the second rollout."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    from safetensors.torch import load_file

    flags = ["--run", kind, "--enable_ema", "--actor_zero_stage", "3", "--save_interval", "5"]
    flags += ["--rollout_engine", rollout]
    straight = run(tmp_path, *flags)
    names = [tmp_path / folder / "model.safetensors" for folder in (kind, f"{kind}_ema")]
    wanted = [load_file(name) for name in names]
    torch.distributed.barrier()
    resumed = run(tmp_path, *flags, "--resume")
    for one, other in zip([load_file(name) for name in names], wanted, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    for name in ("reward", "kl", "entropy"):
        assert [point[name] for point in straight[kind]] == [point[name] for point in resumed[kind]]


@distributed(world_size=2)
def test_resumes_in_the_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFT, the reward model and DPO: each is one update behind its last checkpoint, and has dropout in DPO."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    from safetensors.torch import load_file

    from tests.clients.kit import clean_clients

    train, done = part("train"), []
    language_loss = train.supervised.language_loss
    monkeypatch.setattr(
        train.supervised, "language_loss", lambda *given: (done.append(1), language_loss(*given))[1]
    )
    flags = ["--sft_steps", "31", "--reward_steps", "11", "--dpo_steps", "11", "--save_interval", "10"]
    flags += ["--run", "dpo", "ppo", "--iterations", "1", "--zero_stage", "3", "--actor_dropout", "0.2"]
    flags = [*SHORT, "--output", str(tmp_path), *flags]
    with clean_clients(deepspeed_state=False):
        train.main(flags)
    names = [tmp_path / folder / "model.safetensors" for folder in ("sft", "reward", "dpo")]
    wanted = [load_file(name) for name in names]
    assert len(done) == 31
    torch.distributed.barrier()
    with clean_clients(deepspeed_state=False):
        train.main([*flags, "--resume"])
    assert len(done) == 32
    for one, other in zip([load_file(name) for name in names], wanted, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@distributed(world_size=2)
def test_same_curve_at_other_stages(tmp_path: Path) -> None:
    """On two ranks."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    curves = [run(tmp_path, "--run", "grpo", "--actor_zero_stage", stage)["grpo"] for stage in ("2", "3")]
    for one, other in zip(*curves, strict=True):
        assert one["reward"] == other["reward"] and one["kl"] == pytest.approx(
            other["kl"], rel=1e-2, abs=1e-4
        )


@pytest.mark.slow
def test_same_curve_on_one_rank_and_two(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    script, curves = str(FOLDER / "train.py"), []
    halves = ["--per_device_train_batch_size", "4", "--per_device_generation_batch_size", "4"]
    halves += ["--per_device_training_batch_size", "4"]  # all rows of a rollout are one update on both
    whole = ["--per_device_train_batch_size", "8", "--per_device_generation_batch_size", "8"]
    whole += ["--per_device_training_batch_size", "8"]
    for launcher, sizes in (([], whole), ([*COMMAND[1:], "--num_gpus", "2"], halves)):
        printed(tmp_path, *launcher, script, *SHORT, *sizes, "--run", "grpo", "--iterations", "6")
        curves.append(json.loads((tmp_path / "curves.json").read_text())["grpo"])
    for one, other in zip(*curves, strict=True):
        assert one["reward"] == pytest.approx(other["reward"], rel=1e-2)


@pytest.mark.slow
def test_flags_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the clients extra is not installed")
    flags = (
        "--actor_zero_stage 3 --critic_zero_stage 3 --offload --lora_dim 4 --enable_ema --inference_tp_size 2"
    )
    flags += " --gradient_checkpointing --release_inference_cache --unpin_actor_parameters --run ppo"
    text = printed(
        tmp_path, *COMMAND[1:], "--num_gpus", "2", str(FOLDER / "train.py"), *SHORT, *flags.split()
    )
    assert "PPO: score" in text and (tmp_path / "ppo_ema" / "model.safetensors").exists()

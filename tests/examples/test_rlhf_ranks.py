"""The example of learning from preferences on 1, 2 and 4 ranks: the same rows, tokens, gradients and weights.

Most are in fp64, so that rounding hides nothing: a mean over the wrong rows, or a draw that depends on the rank, shows
in the first digits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import pool
from tests.examples.test_rlhf import part
from tests.pool import distributed

SIZES = {"per_device_train_batch_size": 8, "per_device_generation_batch_size": 16}
SIZES |= {"per_device_training_batch_size": 8}
SHORT = "--sft_steps 12 --reward_steps 6 --iterations 3 --max_answer_seq_len 9 --num_answers 4".split()
SCORED = ["--reward_function", f"{__file__}:different_words"]
POINTS = ("reward", "kl", "length", "entropy")


def different_words(question: str, answer: str) -> float:
    """A reward that also answers of an untrained model differ in."""
    return len(set(answer.split())) / 10


def run(folder: Path, *flags: str) -> dict[str, list[dict[str, float]]]:
    """``main`` of the example with batches of the same size over all ranks."""
    from tests.clients.kit import clean_clients

    ranks = torch.distributed.get_world_size()
    sizes = [f"--{name}={size // ranks}" for name, size in SIZES.items()]
    with clean_clients(deepspeed_state=False):
        return part("train").main([*SHORT, *sizes, "--output", str(folder), *flags])


def at_stage(stage: int) -> list[str]:
    return [f"--{which}zero_stage={stage}" for which in ("", "actor_", "critic_")]


def curves_on(folder: Path, stage: int) -> dict[str, list[dict[str, float]]]:
    return run(
        folder, "--dtype", "fp64", *at_stage(stage), *SCORED, "--iterations", "2", "--run", "ppo", "grpo"
    )


@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_ranks_and_stages_learn_the_same(tmp_path: Path, ranks: int, stage: int) -> None:
    """As one rank at stage 2: curves and weights of all steps."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    one, several = (learned(tmp_path / str(count), count, at) for count, at in ((1, 2), (ranks, stage)))
    for kind, points in one[0].items():
        assert len({point["reward"] for point in points}) == len(points)
        for point, other in zip(points, several[0][kind], strict=True):
            wanted = [point[name] for name in POINTS]
            assert [other[name] for name in POINTS] == pytest.approx(wanted, rel=1e-8, abs=1e-10)
    assert one[1].keys() == several[1].keys()
    for name, param in one[1].items():
        assert param.dtype == torch.float64
        torch.testing.assert_close(several[1][name], param, rtol=1e-7, atol=1e-9)


def in_fp32(folder: Path, stage: int) -> dict[str, list[dict[str, float]]]:
    """Batches of four rows on any number of ranks, of which 2 make an update and 4 are answered at a time."""
    ranks = torch.distributed.get_world_size()
    sizes = {f"--{name}": 4 for name in SIZES} | {
        "--gradient_accumulation_steps": 2 // ranks,
        "--generation_batches": 4 // ranks,
        "--iterations": 8 // ranks,
    }
    flags = [f"{name}={value}" for name, value in sizes.items()]
    return run(folder, "--wide_sums", *at_stage(stage), *SCORED, "--run", "ppo", "grpo", *flags)


def test_wide_sums_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    """In fp32: the weights of all models, and with them every token."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    one, two = (learned(tmp_path / str(count), count, stage, in_fp32) for count, stage in ((1, 2), (2, 3)))
    for kind, points in one[0].items():
        rewards = [point["reward"] for point in points]
        assert len(set(rewards)) > 4
        paired = [(first + second) / 2 for first, second in zip(rewards[::2], rewards[1::2], strict=True)]
        assert [point["reward"] for point in two[0][kind]] == pytest.approx(paired, rel=1e-6)
    for name, param in one[1].items():
        assert param.dtype == torch.float32
        assert torch.equal(two[1][name], param), name


def learned(
    folder: Path, ranks: int, stage: int, curves_of: Callable[..., Any] = curves_on
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Curves, and the weights of all models."""
    from safetensors.torch import load_file

    curves = pool.run(curves_of, ranks, folder=folder, stage=stage)[0]
    weights = {"head": torch.load(folder / "reward" / "head.pt")["weight"]}
    for model in ("sft", "reward", "ppo", "grpo"):
        found = load_file(folder / model / "model.safetensors")
        weights |= {f"{model}.{name}": param for name, param in found.items()}
    return curves, weights


@distributed(world_size=2)
def test_a_reward_model_against_plain_torch(tmp_path: Path) -> None:
    """Three updates on two ranks: those of AdamW on all rows in one process."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    models, flags, losses, task = (part(name) for name in ("models", "flags", "losses", "task"))
    engines, supervised = part("engines"), part("supervised")
    options = flags.arguments(
        None, ["--dtype", "fp64", "--per_device_train_batch_size", "4", "--output", str(tmp_path)]
    )
    tokenizer, rows = models.word_tokenizer(task.WORDS), task.rows(20)

    def made() -> Any:
        return models.ScoredModel(models.small_model(tokenizer, torch.float64).model).double()

    engine = engines.trained(made(), options, stage=2, lr=1e-2, rows=4)
    plain = made()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    mean = supervised.run(
        engine, supervised.preferences(engine, tokenizer, rows, options), 3, tmp_path, options
    )
    for step in range(3):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(options.seed * 7919 + step // 2))
        chosen = [rows[order[step % 2 * 8 + at]] for at in range(8)]
        scores = []
        for which in ("chosen", "rejected"):
            pairs = [(row["prompt"], row[which]) for row in chosen]
            batch = models.encode(tokenizer, pairs, "cpu")
            scores.append(
                plain(batch["tokens"], batch["mask"]).gather(1, losses.last(batch["mask"])[:, None])
            )
        loss = -torch.nn.functional.logsigmoid(scores[0] - scores[1]).mean()
        assert mean[step] == pytest.approx(loss.item(), rel=1e-9)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    for one, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@distributed(world_size=1)
def test_several_batches_before_learning(tmp_path: Path) -> None:
    """The first two batches are answered with the weights of SFT, the third one after what was learned from both."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    flags = "--dtype fp64 --generation_batches 2 --run grpo --ppo_epochs 1 --unsup_coef 0".split()
    curve = run(tmp_path, *flags, *SCORED)["grpo"]
    assert len(curve) == 3
    assert [abs(point["kl"]) < 1e-12 for point in curve] == [True, True, False]
    assert ["training_s" in point for point in curve] == [False, True, True]


@distributed(world_size=2)
def test_resumes_between_batches_that_wait(tmp_path: Path) -> None:
    """The checkpoint is written with half of what two batches are learned from."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    from safetensors.torch import load_file

    flags = "--generation_batches 2 --run ppo --ppo_epochs 1 --save_interval 3".split()
    straight = run(tmp_path, *flags)["ppo"]
    wanted = load_file(tmp_path / "ppo" / "model.safetensors")
    torch.distributed.barrier()
    resumed = run(tmp_path, *flags, "--resume")["ppo"]
    found = load_file(tmp_path / "ppo" / "model.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [point["reward"] for point in straight] == [point["reward"] for point in resumed]


@distributed(world_size=2)
def test_passes_over_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 32 rows: four batches of eight in a pass of SFT, two of sixteen prompts in one of PPO."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    import json

    from tests.clients.kit import clean_clients

    train, done = part("train"), []
    data = tmp_path / "rows.jsonl"
    if torch.distributed.get_rank() == 0:
        data.write_text("\n".join(json.dumps(row) for row in part("task").rows(32)))
    torch.distributed.barrier()
    original = train.supervised.run
    monkeypatch.setattr(train.supervised, "run", lambda *given: (done.append(given[2]), original(*given))[1])
    sizes = [f"--{name}={size // 2}" for name, size in SIZES.items()]
    flags = [*sizes, "--num_train_epochs", "2", "--data_path", str(data), "--run", "ppo"]
    with clean_clients(deepspeed_state=False):
        curves = train.main([*SHORT, *flags, "--output", str(tmp_path)])
    assert done == [8, 8] and len(curves["ppo"]) == 4


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_adapters_of_the_critic(tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only they and the head learn; weights below keep their bits."""
    pytest.importorskip("peft", reason="the clients extra is not installed")
    import deepspeed
    from tests.clients.kit import clean_clients

    train = part("train")
    before, after = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    learn = train.Steps._learn

    def note(learning: Any, where: dict[str, torch.Tensor]) -> None:
        params = dict(learning.critic.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(params.values())):
            where.update({name: param.detach().clone() for name, param in params.items()})

    def noted(steps: Any, learning: Any, folder: Path) -> None:
        note(learning, before)
        learn(steps, learning, folder)
        note(learning, after)

    monkeypatch.setattr(train.Steps, "_learn", noted)
    sizes = [f"--{name}={size // 2}" for name, size in SIZES.items()]
    flags = f"--critic_lora_dim 2 --only_optimize_lora --critic_zero_stage {stage} --run ppo".split()
    flags += ["--critic_gradient_checkpointing", "--iterations", "2"]
    with clean_clients(deepspeed_state=False):
        train.main([*SHORT, *sizes, *flags, "--output", str(tmp_path)])
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    learned = {name for name in before if "lora_" in name or name == "head.weight"}
    assert len(learned) == 2 * 2 * 7 + 1 and changed == learned


def test_every_text_begins_with_the_tokens_that_were_asked_for() -> None:
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    models, task = part("models"), part("task")
    tokenizer = models.word_tokenizer(task.WORDS)
    pad, the, cat, end = tokenizer.convert_tokens_to_ids(["<pad>", "the", "cat", "</s>"])
    prompts = models.encode_prompts(tokenizer, ["the cat", "the"], "cpu", lead=2)
    assert prompts["tokens"].tolist() == [[pad, pad, the, cat], [pad, pad, pad, the]]
    assert prompts["mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    assert models.encode_prompts(tokenizer, ["the cat"], "cpu", lead=1, most=2)["tokens"].tolist() == [
        [pad, the]
    ]
    found = models.encode(tokenizer, [("the", "cat"), ("the", "the cat")], "cpu", lead=1)
    assert found["tokens"].tolist() == [[pad, pad, the, cat, end], [pad, the, the, cat, end]]
    assert found["mask"].tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert found["answers"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]
    tokenizer.bos_token = "</s>"  # as OPT's
    assert models.encode_prompts(tokenizer, ["the"], "cpu", lead=1)["tokens"].tolist() == [[end, the]]


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
@distributed(world_size=2)
def test_learning_from_the_forwards_that_scored(tmp_path: Path, kind: str) -> None:
    """The same curve and weights as with separate forwards, with fewer forwards."""
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    from safetensors.torch import load_file

    from deepspeed.engine.engine import DeepSpeedEngine

    found, forwards = [], list[int]()
    flags = ["--run", kind, *SCORED, "--ppo_epochs", "1", "--per_device_training_batch_size", "8"]
    flags += ["--unsup_coef", "0", "--critic_zero_stage", "3"]
    plain = DeepSpeedEngine.forward
    for more in (
        [],
        ["--no-share_forwards"],
        ["--actor_dropout", "0.1", "--no-share_forwards"],
        ["--actor_dropout", "0.1"],
    ):
        forwards.append(0)

        def forward(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
            forwards[-1] += 1
            return plain(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeepSpeedEngine, "forward", forward)
            points = run(tmp_path, *flags, *more)[kind]
        found.append(
            (
                [[point[name] for name in POINTS] for point in points],
                load_file(tmp_path / kind / "model.safetensors"),
            )
        )
        torch.distributed.barrier()
    saved = 3 * (2 if kind == "ppo" else 1)
    assert forwards == [forwards[1] - saved, forwards[1], forwards[1], forwards[1]]
    for (points, weights), (wanted, others) in ((found[0], found[1]), (found[2], found[3])):
        assert points == wanted
        assert all(torch.equal(weights[name], others[name]) for name in others)

"""Steps that learn from texts that are there: demonstrations (SFT), and preferences (a reward model, or DPO)."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from losses import direct_preference_loss, preference_loss, row_mean, token_log_probs
from models import context, encode, score_at_end, without_adapters
from torch import Tensor

Row = dict[str, str]


def batch_of(rows: list[Row], step: int, count: int, seed: int) -> list[Row]:
    """This rank's ``count`` rows of a step; all ranks together see the same rows in the same step, however many they
    are, if they have as many in sum."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    everyone = count * ranks
    per_epoch = max(1, len(rows) // everyone)
    order = torch.randperm(
        len(rows), generator=torch.Generator().manual_seed(seed * 7919 + step // per_epoch)
    )
    start = step % per_epoch * everyone + rank * count
    return [rows[order[(start + at) % len(rows)]] for at in range(count)]


def language_loss(engine: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean negative log-probability of the tokens of the answers."""
    return -row_mean(log_probs(engine, batch), batch["answers"][:, 1:])


def log_probs(engine: Any, batch: dict[str, Tensor]) -> Tensor:
    """[rows, length - 1], of each token but the first; 0 before the first answer begins, if the model can leave out
    logits there."""
    tokens, module = batch["tokens"], without_adapters(engine.module)
    given, begin = context(module, batch["mask"]), 1
    if "logits_to_keep" in inspect.signature(type(module).forward).parameters:
        begin = max(1, int(batch["answers"].any(0).int().argmax()))
        given["logits_to_keep"] = tokens.shape[1] - begin + 1
    found = token_log_probs(engine(input_ids=tokens, **given).logits, tokens[:, begin - 1 :])
    return torch.nn.functional.pad(found, (begin - 1, 0))


def run(
    engine: Any, loss: Callable[[int], Tensor], steps: int, folder: Path, options: Namespace
) -> list[float]:
    """The loss of each step, mean over its batches of all ranks. ``loss`` is given the number of a batch. A checkpoint
    in ``folder`` every ``save_interval`` steps; with ``resume`` on from the last one, to the same bits: what a step
    learns from, and its random numbers, follow from its number."""
    first, losses, batches = 0, list[float](), options.gradient_accumulation_steps
    if options.resume and folder.exists():
        _, state = engine.load_checkpoint(str(folder))
        first, losses = state["steps"], state["losses"]
    engine.train()
    for step in range(first, steps):
        same_noise(options.seed, step)
        seen = 0.0
        for batch in range(step * batches, (step + 1) * batches):
            value = loss(batch)
            engine.backward(value)
            engine.step()
            seen += value.item() / batches
        losses.append(mean_over_ranks(seen))
        if options.save_interval and (step + 1) % options.save_interval == 0:
            engine.save_checkpoint(str(folder), client_state={"steps": step + 1, "losses": losses})
    return losses


def same_noise(seed: int, step: int) -> None:
    """Let what is random in a step, such as dropout, follow from its number and the rank."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.manual_seed((seed * 1_000_003 + step) * ranks + rank)


def mean_over_ranks(value: Tensor | float) -> float:
    found = torch.as_tensor(value, dtype=torch.float64).clone()
    torch.distributed.all_reduce(found)
    return found.item() / torch.distributed.get_world_size()


def demonstrations(
    engine: Any, tokenizer: Any, rows: list[Row], options: Namespace
) -> Callable[[int], Tensor]:
    """The loss of SFT, by step."""

    def loss(step: int) -> Tensor:
        chosen = batch_of(rows, step, options.per_device_train_batch_size, options.seed)
        pairs = [(row["prompt"], row.get("demonstration", row["chosen"])) for row in chosen]
        return language_loss(
            engine, encode(tokenizer, pairs, engine.device, options.num_padding_at_beginning)
        )

    return loss


def preferences(engine: Any, tokenizer: Any, rows: list[Row], options: Namespace) -> Callable[[int], Tensor]:
    """The loss of a reward model, by step."""

    def loss(step: int) -> Tensor:
        chosen = batch_of(rows, step, options.per_device_train_batch_size, options.seed)
        batch = _both(tokenizer, chosen, engine, options)
        return preference_loss(*score_at_end(engine, batch["tokens"], batch["mask"]).chunk(2))

    return loss


def direct_preferences(
    engine: Any, reference: Any, tokenizer: Any, rows: list[Row], options: Namespace
) -> Callable[[int], Tensor]:
    """The loss of DPO, by step."""

    def loss(step: int) -> Tensor:
        chosen = batch_of(rows, step, options.per_device_train_batch_size, options.seed)
        batch = _both(tokenizer, chosen, engine, options)
        answers = batch["answers"][:, 1:]
        with torch.no_grad():
            before = (log_probs(reference, batch) * answers).sum(1)
        now = (log_probs(engine, batch) * answers).sum(1)
        return direct_preference_loss(now, before, options.dpo_beta)[0]

    return loss


def accuracy(engine: Any, tokenizer: Any, rows: list[Row], options: Namespace) -> float:
    """How often the chosen answer has the higher score."""
    engine.eval()
    batch = _both(tokenizer, rows, engine, options)
    with torch.no_grad():
        chosen, rejected = score_at_end(engine, batch["tokens"], batch["mask"]).chunk(2)
    return (chosen > rejected).float().mean().item()


def _both(tokenizer: Any, rows: list[Row], engine: Any, options: Namespace) -> dict[str, Tensor]:
    """The chosen answers and then the rejected ones."""
    pairs = [(row["prompt"], row[kind]) for kind in ("chosen", "rejected") for row in rows]
    return encode(tokenizer, pairs, engine.device, options.num_padding_at_beginning)

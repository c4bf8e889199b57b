"""Steps that learn from the model's own answers: PPO with four models, GRPO and RLOO with a function as the reward."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import losses
import task
import torch
from engines import follow
from models import encode, encode_prompts, has_dropout, score_at_end
from supervised import Row, batch_of, language_loss, log_probs, mean_over_ranks, same_noise
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from deepspeed.runtime.rollout import (
    RolloutBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
    importance_weights,
    rollout_mismatch,
)

Batch = dict[str, Tensor]


class SeededNoise(LogitsProcessor):
    """Turns the most probable token into a sample (Gumbel noise), the same for a row wherever and with whom it is
    generated: the noise depends on the row's number, the token's place and the seed only.

    Args:
        rows: numbers of the rows.
        seed: of the run.
        prompt: tokens of the prompts, with padding.
        temperature: 1 samples from the model's distribution.
    """

    def __init__(self, rows: list[int], seed: int, prompt: int, temperature: float) -> None:
        self.rows, self.seed, self.prompt, self.temperature = rows, seed, prompt, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place, width = input_ids.shape[1] - self.prompt, scores.shape[1]
        draws = [
            torch.rand(
                width, generator=torch.Generator().manual_seed((self.seed * 1_000_003 + row) * 4099 + place)
            )
            for row in self.rows
        ]
        uniform = torch.stack(draws).clamp(1e-9, 1 - 1e-7).to(scores.device)
        return scores.float() / self.temperature - torch.log(-torch.log(uniform))


class Online:
    """Collects answers to a batch of prompts, learns from them in several updates, and goes on with the next batch.

    Args:
        kind: ``ppo``, ``grpo`` or ``rloo``.
        actor: the hybrid engine.
        reference: the model that the actor should stay near to.
        critic, reward: of PPO.
        average: an engine whose weights follow the actor's, or None.
        score: of (prompt, answer); the reward of GRPO and RLOO, and of all kinds what the curve shows.
    """

    def __init__(
        self,
        kind: str,
        options: Namespace,
        tokenizer: Any,
        rows: list[Row],
        score: Callable[[str, str], float],
        *,
        actor: Any,
        reference: Any,
        critic: Any = None,
        reward: Any = None,
        average: Any = None,
    ) -> None:
        self.kind, self.options, self.tokenizer, self.rows, self.score = kind, options, tokenizer, rows, score
        self.texts = (
            rows
            if options.unsupervised_dataset_name is None
            else task.samples(options.unsupervised_dataset_name)
        )
        self.actor, self.reference, self.critic, self.reward, self.average = (
            actor,
            reference,
            critic,
            reward,
            average,
        )
        self.rollouts: Any = None
        if options.rollout_engine != "hybrid_engine":
            self.rollouts = build_rollout(RolloutConfig(options.rollout_engine), actor, tokenizer)
        self.is_ahead = options.rollout_engine == "serving_ahead"
        self.ready: RolloutBatch | None = None  # answers of a checkpoint that were ahead
        self.iteration = 0  # batches of answers that were learned from
        self.update = 0  # of those with the batches in ``experience``
        self.experience: list[Batch] = []
        self.shared: tuple[Tensor, Tensor | None] | None = (
            None  # with graphs, from ``collect`` to its only update
        )
        self.curve: list[dict[str, float]] = []

    # ------------------------------------------------------------------------------------------------ rollouts

    def collect(self, iteration: int) -> Batch:
        """Answers of the actor, and what all models say of them."""
        began = time.perf_counter()
        chosen = self._questions(iteration)
        if self.rollouts is None:
            found, rolled = self._answers(chosen, iteration)
        else:
            found, rolled = self._served(iteration)
        seconds = time.perf_counter() - began
        mask = found["answers"][:, 1:]
        texts = [
            self.tokenizer.decode(row[kept.bool()], skip_special_tokens=True)
            for row, kept in zip(found["tokens"], found["answers"], strict=True)
        ]
        true = [self.score(question, text) for question, text in zip(chosen, texts, strict=True)]
        now, values = self._said(found)
        with torch.no_grad():
            found["then"] = now.detach() * mask
            found["scores"] = found["then"].new_tensor(true)
            if self.is_ahead:
                assert rolled is not None
                found["weights"] = importance_weights(
                    found["then"], rolled, mask, cap=self.options.importance_cap
                )
            found["reference"] = log_probs(self.reference, found) * mask
            if self.kind == "ppo":
                ended = ((found["tokens"] == self.tokenizer.eos_token_id) * found["answers"]).any(1)
                found["rewards"] = score_at_end(self.reward, found["tokens"], found["mask"])
                found["rewards"] -= self.options.missing_eos_penalty * ~ended
                assert values is not None
                found["values"] = values.detach() * mask
        self._report(iteration, found, rolled, seconds, texts[0])
        return found

    def _said(self, found: Batch) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities by the actor, and values by the critic if there is one; kept for the update if it can begin
        from them."""
        shared = self._is_shared
        for engine in (self.actor, self.critic):
            if engine is not None:
                engine.train(shared)
        with torch.set_grad_enabled(shared):
            now = log_probs(self.actor, found)
            values = None if self.critic is None else self._values(found)
        self.shared = (now, values) if shared else None
        return now, values

    def _values(self, batch: Batch) -> Tensor:
        return self.critic(batch["tokens"], batch["mask"])[:, :-1]

    @property
    def _is_shared(self) -> bool:
        """Whether the only update with a batch of answers needs the very forwards that say what was thought of them."""
        options = self.options
        whole = options.per_device_generation_batch_size == options.per_device_training_batch_size
        once = options.ppo_epochs == options.generation_batches == 1
        trained = [engine.module for engine in (self.actor, self.critic) if engine is not None]
        return options.share_forwards and whole and once and not any(map(has_dropout, trained))

    def _questions(self, iteration: int) -> list[str]:
        """Of this rank; one that gets several answers is there as often, in a row."""
        options, size = self.options, self._answers_to_each
        prompts = options.per_device_generation_batch_size // size
        rows = batch_of(self.rows, iteration, prompts, options.seed)
        return [row["prompt"] for row in rows for _ in range(size)]

    def _numbers(self, questions: list[str], iteration: int) -> list[int]:
        """Of the rows, among those of all ranks and all batches of answers."""
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        first = (iteration * ranks + rank) * len(questions)
        return list(range(first, first + len(questions)))

    @property
    def _answers_to_each(self) -> int:
        return 1 if self.kind == "ppo" else self.options.num_answers

    def _encoded(self, questions: list[str]) -> Batch:
        options = self.options
        lead, most = options.num_padding_at_beginning, options.max_prompt_seq_len
        return encode_prompts(self.tokenizer, questions, self.actor.device, lead, most)

    def _served(self, iteration: int) -> tuple[Batch, Tensor]:
        """As ``_answers``, by continuous batching; ahead: those that were begun before the last batch was learned from,
        while the next ones are begun with the weights of now."""
        rollouts: Any = self.rollouts
        made: Any
        if not self.is_ahead:
            made = rollouts.generate(*self._request(iteration))
        else:
            if self.ready is None and not rollouts.in_progress:
                rollouts.begin(*self._request(iteration))
            made = rollouts.finish() if self.ready is None else self.ready
            self.ready = None
            rollouts.sync_weights(iteration)
            rollouts.begin(*self._request(iteration + 1))
        width = int(made.response_start_idx[0])
        before = torch.zeros_like(made.attention_mask[:, :width])
        answers = torch.cat([before, made.attention_mask[:, width:]], 1)
        rolled = torch.cat([before[:, 1:].float(), made.log_probs], 1)
        return {"tokens": made.input_ids, "mask": made.attention_mask, "answers": answers}, rolled

    def _request(self, iteration: int) -> tuple[RolloutRequest, SamplingConfig]:
        options, questions = self.options, self._questions(iteration)
        given = self._encoded(questions)
        seeds = [options.seed * 1_000_003 + row for row in self._numbers(questions, iteration)]
        request = RolloutRequest(given["tokens"], given["mask"], seeds)
        return request, SamplingConfig(
            options.max_answer_seq_len, temperature=options.temperature, log_probs=True
        )

    def _answers(self, questions: list[str], iteration: int) -> tuple[Batch, Tensor | None]:
        """Tokens with masks, and the log-probabilities that generation had, if it tells them."""
        options, tokenizer = self.options, self.tokenizer
        given = self._encoded(questions)
        width = given["tokens"].shape[1]
        alone = options.inference_tp_size == 1
        noise = SeededNoise(self._numbers(questions, iteration), options.seed, width, options.temperature)
        self.actor.eval()
        with torch.no_grad():
            made = self.actor.module.generate(
                input_ids=given["tokens"],
                attention_mask=given["mask"],
                max_new_tokens=options.max_answer_seq_len,
                do_sample=not alone,  # ranks that share layers draw the same numbers by themselves
                logits_processor=LogitsProcessorList([noise] if alone else []),
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                **({"return_dict_in_generate": True, "output_logits": True} if alone else {}),
            )
        tokens = made.sequences if alone else made
        answers = tokens[:, width:]
        ended = (answers == tokenizer.eos_token_id).int()
        kept = (ended.cumsum(1) - ended == 0).long()
        before = torch.zeros_like(given["mask"])
        found = {
            "tokens": tokens,
            "mask": torch.cat([given["mask"], kept], 1),
            "answers": torch.cat([before, kept], 1),
        }
        if not alone:
            return found, None
        logits = torch.stack(made.logits, 1).float().log_softmax(-1)
        rolled = logits.gather(2, answers[..., None])[..., 0] * kept
        return found, torch.cat([before[:, 1:].to(rolled.dtype), rolled], 1)

    def _report(self, iteration: int, found: Batch, rolled: Tensor | None, seconds: float, text: str) -> None:
        mask = found["answers"][:, 1:]
        made = mask.sum().item()
        values = {
            "reward": found["scores"].mean(),
            "kl": ((found["then"] - found["reference"]).sum(1)).mean(),
            "length": mask.sum(1).float().mean(),
            "entropy": -losses.row_mean(found["then"], mask),  # an estimate from the tokens that were drawn
            "rollout_mismatch": 0.0
            if rolled is None
            else rollout_mismatch(found["then"], rolled, mask)["largest"],
            "rollout_s": seconds,
            "rollout_tokens_per_s": made / seconds,
        }
        self.curve.append({name: mean_over_ranks(value) for name, value in values.items()})
        self._write(iteration, self.curve[-1])
        if torch.distributed.get_rank() == 0 and self.options.print_answers:
            print(f"[{self.kind} {iteration}] {text}", flush=True)

    def _write(self, iteration: int, values: dict[str, float]) -> None:
        """To the monitor of the actor's engine, by the number of the batch of answers."""
        monitor = self.actor.monitor
        if monitor.enabled and torch.distributed.get_rank() == 0:
            monitor.write_events(
                [(f"RLHF/{self.kind}/{name}", value, iteration) for name, value in values.items()]
            )

    def _report_training(self, iteration: int) -> None:
        """Of all updates with the batches of answers up to this one; mean over ranks."""
        point = self.curve[-1]
        seconds, tokens = point["training_s"], point.pop("training_tokens")
        found = {"training_s": seconds, "training_tokens_per_s": tokens / seconds}
        point |= {name: mean_over_ranks(value) for name, value in found.items()}
        self._write(iteration, {name: point[name] for name in found})

    # ------------------------------------------------------------------------------------------------ learning

    @property
    def _parts(self) -> int:
        """Of one batch of answers, for an update each."""
        rows = self.options.per_device_generation_batch_size
        return rows // self.options.per_device_training_batch_size

    def step(self) -> None:
        """One update; if there are no answers to learn from, they are collected before."""
        options = self.options
        if not self.experience:
            end = min(self.iteration + options.generation_batches, options.iterations)
            for iteration in range(self.iteration, max(end, self.iteration + 1)):
                self.experience.append(self._targets(self.collect(iteration)))
        # Each update takes every so manyth row: of all ranks together the same ones, however many ranks there are.
        batches, used = len(self.experience), self._parts * options.per_device_training_batch_size
        batch = self.experience[self.update // self._parts % batches]
        chosen = slice(self.update % self._parts, used, self._parts)
        part = {name: value[chosen] for name, value in batch.items()}
        began, updates = time.perf_counter(), self.actor.global_steps
        self._learn(part)
        point, spent = self.curve[-1], time.perf_counter() - began
        for name, value in (("training_s", spent), ("training_tokens", part["mask"].sum().item())):
            point[name] = point.get(name, 0.0) + value
        if self.average is not None and self.actor.global_steps > updates:
            follow(self.average, self.actor, self.options.ema_beta)
        self.update += 1
        if self.update == options.ppo_epochs * self._parts * batches:
            self.iteration, self.update, self.experience = self.iteration + batches, 0, []
            self._report_training(self.iteration - 1)

    @property
    def _number(self) -> int:
        """Of this update, among all."""
        return self.iteration * self.options.ppo_epochs * self._parts + self.update

    def _targets(self, found: Batch) -> Batch:
        """Advantages, from what the models said."""
        options, mask = self.options, found["answers"][:, 1:]
        if self.kind == "ppo":
            rewards = losses.shaped_rewards(
                found["rewards"],
                found["then"],
                found["reference"],
                mask,
                options.kl_coef,
                options.clip_reward,
            )
            found["advantages"], found["returns"] = losses.advantages_and_returns(
                found["values"], rewards, mask, options.gamma, options.lam
            )
            return found
        scores = found["scores"]
        if self.kind == "rloo":
            scores = scores - options.kl_coef * (found["then"] - found["reference"]).sum(1)
        each = losses.group_advantages(scores, options.num_answers, self.kind)
        found["advantages"] = each[:, None] * mask
        return found

    def _learn(self, part: Batch) -> None:
        options, mask = self.options, part["answers"][:, 1:]
        same_noise(options.seed + 1, self._number)
        self.actor.train()
        shared, self.shared = self.shared, None
        now = log_probs(self.actor, part) if shared is None else shared[0]
        loss = losses.clipped_policy_loss(
            now, part["then"], part["advantages"], mask, options.clip_range, part.get("weights", 1.0)
        )
        if self.kind == "grpo":
            loss = loss + options.kl_coef * losses.reference_penalty(now, part["reference"], mask)
        self.actor.backward(loss)
        if options.unsup_coef > 0:
            self.actor.backward(options.unsup_coef * self._mixture())
        self.actor.step()
        if self.kind == "ppo":
            self.critic.train()
            values: Any = self._values(part) if shared is None else shared[1]
            self.critic.backward(
                losses.clipped_value_loss(values, part["values"], part["returns"], mask, options.clip_value)
            )
            self.critic.step()

    def _mixture(self) -> Tensor:
        """The loss on demonstrations, which keeps the actor's language (the mixture of InstructGPT)."""
        options = self.options
        rows = batch_of(self.texts, self._number, options.per_device_training_batch_size, options.seed + 1)
        pairs = [(row["prompt"], row.get("demonstration", row["chosen"])) for row in rows]
        lead = options.num_padding_at_beginning
        return language_loss(self.actor, encode(self.tokenizer, pairs, self.actor.device, lead))

    # ------------------------------------------------------------------------------------------------- resuming

    def _engines(self) -> dict[str, Any]:
        everyone = {"actor": self.actor, "critic": self.critic, "average": self.average}
        return {name: engine for name, engine in everyone.items() if engine is not None}

    def save(self, folder: Path) -> None:
        """Everything to go on with the very next update, also between two of one batch of answers. Collective."""
        state = {name: getattr(self, name) for name in ("iteration", "update", "experience", "curve")}
        if self.is_ahead and self.rollouts.in_progress:
            self.ready = self.rollouts.finish()
        state["ready"] = None if self.ready is None else vars(self.ready)
        for name, engine in self._engines().items():
            engine.save_checkpoint(str(folder / name))
        torch.save(state, folder / f"rollouts_{torch.distributed.get_rank()}.pt")
        torch.distributed.barrier()

    def load(self, folder: Path) -> None:
        """What ``save`` wrote, with as many ranks. Collective."""
        for name, engine in self._engines().items():
            engine.load_checkpoint(str(folder / name))
        state = torch.load(folder / f"rollouts_{torch.distributed.get_rank()}.pt", weights_only=True)
        ready = state.pop("ready")
        self.ready = None if ready is None else RolloutBatch(**ready)
        for name, value in state.items():
            setattr(self, name, value)

    def close(self) -> None:
        """No further step."""
        if self.rollouts is not None:
            self.rollouts.shutdown()

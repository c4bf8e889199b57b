"""Schedule of the number of tokens that the dropping layers keep at each step (Yao et al.: Random-LTD, 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.data import wrong_lengths
from deepspeed.data.data_routing.sampling import TokenSampler

MIN_VALUE, MAX_VALUE, CURRENT_VALUE = "min_value", "max_value", "current_value"
SCHEDULE_TYPE, SCHEDULE_CONFIG = "schedule_type", "schedule_config"
CONSUMED_LAYER_TOKENS, CURRENT_STEP = "consumed_layer_tokens", "current_steps"
_SAVED = (CONSUMED_LAYER_TOKENS, CURRENT_STEP, CURRENT_VALUE, MIN_VALUE, MAX_VALUE)


class RandomLTDScheduler:
    """The schedule of random-LTD, with the count of layer tokens (tokens processed, summed over layers). ``state``
    holds the schedule and the current length, which grows from ``min_value`` to ``max_value``.

    Args:
        config: the section ``random_ltd`` with ``global_batch_size``.

    ``sampler`` chooses the tokens: outside an engine with torch's generator.

    DeepSpeedConfigError: the schedule is incomplete.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.state: dict[str, Any] = {}
        self.model_layer_num: int = config["total_layer_num"]
        self.random_ltd_layer_num: int = config["random_ltd_layer_num"]
        self.global_batch_size: int = config["global_batch_size"]
        self.config_schedule: Mapping[str, Any] | None = config["random_ltd_schedule"]
        if self.config_schedule is not None and (wrong := wrong_lengths(self.config_schedule)):
            raise DeepSpeedConfigError(wrong)
        self.sampler = TokenSampler(self.random_ltd_layer_num)
        self.reset_to_init()

    def get_value(self, global_steps: int) -> int:
        """Return the length at a step, counted from 0: min + (max - min) step / require_steps, rounded down to a
        multiple of ``seq_per_step``, at least min (rounded up to a multiple), and max from ``require_steps`` on.

        RuntimeError: the type is not ``fixed_linear``.
        """
        state = self.state
        if state.get(SCHEDULE_TYPE) != "fixed_linear":
            raise RuntimeError(
                f"random_ltd_schedule.schedule_type={state.get(SCHEDULE_TYPE)!r} is unknown: only "
                "fixed_linear is supported"
            )
        low, high, details = state[MIN_VALUE], state[MAX_VALUE], state[SCHEDULE_CONFIG]
        unit = details["seq_per_step"]
        length = math.floor(low + (high - low) * (global_steps / details["require_steps"]))
        least = max(-(-low // unit) * unit, unit)
        return min(max(length - length % unit, least), high)

    def reset_to_init(self) -> None:
        """Reset to the state before the first step."""
        if self.config_schedule is not None:
            for key in (MIN_VALUE, MAX_VALUE, SCHEDULE_TYPE, SCHEDULE_CONFIG):
                self.state[key] = self.config_schedule[key]
            self.state[CURRENT_VALUE] = self.config_schedule[MIN_VALUE]
        self.state[CONSUMED_LAYER_TOKENS] = 0
        self.state[CURRENT_STEP] = -1

    def get_current_seq(self) -> int:
        """Return the number of tokens that a dropping layer keeps now."""
        return self.state[CURRENT_VALUE]

    def set_current_seq(self, seq_length: int) -> None:
        """Set the length until the next step; permanently if it is at least ``max_value``."""
        self.state[CURRENT_VALUE] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        return self.random_ltd_layer_num

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Return the layer tokens of a run of this many steps. Advances the schedule: undo with ``reset_to_init``."""
        for step in range(train_iters):
            self.update_seq(step)
        return self.state[CONSUMED_LAYER_TOKENS]

    def update_seq(self, global_steps: int, longest: int | None = None) -> None:
        """Advance to a step and count its layer tokens once, assuming sequences of ``max_value`` tokens, or of
        ``longest`` if truncated."""
        state = self.state
        if state[CURRENT_VALUE] < state[MAX_VALUE]:
            state[CURRENT_VALUE] = self.get_value(global_steps)
        if global_steps != state[CURRENT_STEP]:
            state[CURRENT_STEP] = global_steps
            state[CONSUMED_LAYER_TOKENS] += self.layer_tokens(longest)

    def layer_tokens(self, longest: int | None = None) -> int:
        """Return the layer tokens of a step with the current length."""
        dropping = self.random_ltd_layer_num
        whole = self.state[MAX_VALUE] if longest is None else min(longest, self.state[MAX_VALUE])
        kept = min(self.state[CURRENT_VALUE], whole)
        return self.global_batch_size * (kept * dropping + whole * (self.model_layer_num - dropping))

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {key: self.state[key] for key in _SAVED}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.state.update({key: state_dict[key] for key in _SAVED})

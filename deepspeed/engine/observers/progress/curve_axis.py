"""The x axis of the engine's curves: ``monitor.x``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspeed.base.logging import logger
from deepspeed.observe.monitor.monitor import Event

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

SAMPLES, STEPS, TOKENS = "samples", "steps", "tokens"
PREFIXES = {SAMPLES: "Train/Samples/", STEPS: "Train/Steps/", TOKENS: "Train/Tokens/"}
"""Prefixes of the names of the engine's curves, by their x axis (``monitor.x``)."""


class CurveAxis:
    """The x axis of the engine's curves: samples, steps or tokens so far, over all ranks.

    Token counts go into checkpoints. After loading one without them, earlier samples are assumed to be as long as
    those of the next step.
    """

    def __init__(self, engine: Engine, x: str = SAMPLES) -> None:
        self._engine, self.x = engine, x
        self._tokens, self._at_samples = 0, 0
        self.counts_tokens = x == TOKENS
        if self.counts_tokens:
            engine.checkpointed_observers["curve_axis"] = self

    def events(self, values: Mapping[str, Any], prefix: str | None = None) -> list[Event]:
        """Return one point per curve. ``prefix``: prefix of names, by default the one for the x axis."""
        x = {SAMPLES: self._engine.global_samples, STEPS: self._engine.global_steps, TOKENS: self._tokens}[
            self.x
        ]
        prefix = PREFIXES[self.x] if prefix is None else prefix
        return [(prefix + name, value, x) for name, value in values.items()]

    def advance(self, samples: int, tokens: int | None) -> None:
        """Count the tokens of the step that has just ended."""
        if tokens is None:
            self.x, self.counts_tokens = SAMPLES, False
            logger.warning(
                "monitor.x is 'tokens', but the engine sees no token ids (2-D integers, batch x sequence) "
                "among the inputs: plotting over samples; set monitor.x to 'samples' or 'steps'"
            )
            return
        before = self._engine.global_samples - samples
        if self._at_samples != before:
            self._tokens = round(before * tokens / samples)
        self._tokens, self._at_samples = self._tokens + tokens, self._engine.global_samples

    def state_dict(self) -> dict[str, int]:
        return {"tokens": self._tokens, "samples": self._at_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._tokens, self._at_samples = int(state["tokens"]), int(state["samples"])

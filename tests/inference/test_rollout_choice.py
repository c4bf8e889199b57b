"""Selection of the engine of a rollout."""

from __future__ import annotations

from types import SimpleNamespace

from deepspeed.engine.rollout import RolloutConfig, SamplingConfig, build_rollout


def test_any_object_says_which_engine_generates() -> None:
    settings = SimpleNamespace(engine="hybrid_engine", max_prompt_length=8)
    made = build_rollout(settings, SimpleNamespace(module=None), None)  # pyright: ignore[reportArgumentType]
    assert made.name == RolloutConfig().engine
    assert SamplingConfig(max_new_tokens=4, continuous_batch_size=2).n_samples_per_prompt == 1

"""Models whose forward cannot be followed are split by their own `tp_plan`, once it was tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from deepspeed.parallel.tensor.planning.plan import PlanError  # noqa: E402
from deepspeed.parallel.tensor.planning.planner import plan_module  # noqa: E402
from deepspeed.parallel.tensor.trial import try_split  # noqa: E402
from tests.parallel.tensor.threads import ThreadGroup, run_ranks  # noqa: E402


class Looking(transformers.LlamaForCausalLM):
    """Decides by a value, which no graph can."""

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        if int(input_ids.max()) < 0:
            raise ValueError("negative tokens")
        return super().forward(input_ids, **others)


def looking() -> Looking:
    return Looking(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


@pytest.mark.parametrize("wrong", ["", "layers.*.self_attn.o_proj", "layers.*.mlp.down_proj"])
def test_a_wrong_plan_is_refused_by_the_name_of_a_layer(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = looking()
    own = {name: kind for name, kind in model.tp_plan.items() if not wrong or not name.endswith(wrong)}
    assert len(own) == len(model.tp_plan) - bool(wrong)
    monkeypatch.setattr(Looking, "tp_plan", own)
    made = plan_module(model, 2)
    assert "could not be traced" in made.source

    def said(group: ThreadGroup) -> str:
        try:
            return try_split(made, group)
        except PlanError as error:
            return str(error)

    expected = (
        "split over 2 ranks, the model would compute different results than unsplit, starting with"
        if wrong
        else "compared with the whole model on a few tokens"
    )
    for text in run_ranks(2, said):
        assert expected in text

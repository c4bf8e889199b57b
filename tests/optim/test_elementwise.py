from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.plan import Plan, make_plan
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.sgd import SGD
from deepspeed.optim import elementwise
from deepspeed.optim.elementwise import check_partitioning, is_elementwise
from deepspeed.zero.optimizer_registry import set_optimizer_flags

ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
WHOLE = ["Adafactor", "LBFGS", "SparseAdam"] + (["Muon"] if hasattr(torch.optim, "Muon") else [])


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(4, 4))]


class Lars(torch.optim.SGD):
    """The rate of a tensor follows the ratio of two norms."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p -= self.param_groups[0]["lr"] * p.norm() / p.grad.norm() * p.grad


class Standstill(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torch_optimizers_that_may_be_cut(name: str) -> None:
    assert is_elementwise(getattr(torch.optim, name)(_params(), lr=1e-3))


@pytest.mark.parametrize("name", WHOLE)
def test_torch_optimizers_that_may_not(name: str) -> None:
    assert not is_elementwise(getattr(torch.optim, name)(_params()))


def test_others() -> None:
    assert is_elementwise(FusedAdam(_params())) and is_elementwise(FusedLion(_params()))
    assert not is_elementwise(FusedLamb(_params()))
    assert not is_elementwise(Lars(_params(), lr=0.1))
    assert not is_elementwise(Standstill(_params(), lr=0.1))  # nothing was seen, nothing is promised


@pytest.mark.parametrize(
    "cls", [DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedAdam, FusedLion, FusedLamb, SGD]
)
def test_our_own_are_what_they_say(cls: type[torch.optim.Optimizer]) -> None:
    """They are not tried at every start; here they are."""
    optimizer = cls(_params(), lr=0.01)  # type: ignore[call-arg]
    assert isinstance(optimizer, MultiTensorOptimizer)
    assert is_elementwise(optimizer) == elementwise._probe(optimizer) == (cls is not FusedLamb)
    assert cls not in elementwise._verdicts


def test_the_probe_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recent(torch.optim.AdamW):
        pass

    params = _params()
    optimizer = Recent(params, lr=0.1, fused=True)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)  # the rate stands at 0
    before, random_state = params[0].detach().clone(), torch.get_rng_state()
    assert is_elementwise(optimizer)
    assert torch.equal(params[0], before) and not optimizer.state and not called
    assert torch.equal(torch.get_rng_state(), random_state)
    assert optimizer.param_groups[0]["params"][0] is params[0] and schedule.get_last_lr() == [0.0]
    monkeypatch.setattr(elementwise, "_probe", lambda _: pytest.fail("found a second time"))
    assert is_elementwise(optimizer)


def test_muon_flags() -> None:
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(3, 4), "up": torch.nn.Linear(4, 4), "lm_head": torch.nn.Linear(4, 3)}
    )
    set_optimizer_flags(SimpleNamespace(optimizer_name="adam"), model)
    assert not any(hasattr(p, "use_muon") for p in model.parameters())
    set_optimizer_flags(SimpleNamespace(optimizer_name="Muon"), model)
    assert [n for n, p in model.named_parameters() if vars(p)["use_muon"]] == ["up.weight"]


def test_our_own_refuse_complex_parameters() -> None:
    optimizer = FusedAdam(_params())
    with pytest.raises(ValueError, match="FusedAdam does not support complex parameters"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("stage", [1, 2])
def test_parts_that_change_the_update_are_refused_or_told(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(elementwise, "warning_once", told.append)

    def plan_for(**given: bool) -> Plan:
        config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, **given}
        return make_plan(DeepSpeedConfig(config))

    lars = Lars(_params(), lr=0.1)
    with pytest.raises(DeepSpeedConfigError, match=f"Lars .*stage={stage} .*use stage 0, or set zero_allow"):
        check_partitioning(lars, plan_for())
    check_partitioning(torch.optim.AdamW(_params()), plan_for(zero_allow_untested_optimizer=True))
    assert not told
    check_partitioning(lars, plan_for(zero_allow_untested_optimizer=True))
    assert "Lars" in told[0] and "its updates differ from those of whole tensors" in told[0]

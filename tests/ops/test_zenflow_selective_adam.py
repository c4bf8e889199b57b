"""AdamW of chosen columns, against torch's AdamW of a parameter that has no other columns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.ops.adam import ZenFlowSelectiveAdamW

COLUMNS = torch.tensor([4, 0, 3])


def select(param: nn.Parameter, grad: torch.Tensor) -> None:
    if param.dim() == 2:
        param.selected_indices = COLUMNS
    param.selected_grad = grad


def twins(shape: tuple[int, ...], **options):
    """(a parameter, its optimizer, a parameter of the chosen columns, torch's AdamW of that)."""
    param = nn.Parameter(torch.randn(shape))
    chosen = nn.Parameter(param.detach()[:, COLUMNS].clone() if len(shape) == 2 else param.detach().clone())
    settings = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}
    return (
        param,
        ZenFlowSelectiveAdamW([param], **settings, **options),
        chosen,
        torch.optim.AdamW([chosen], **settings),
    )


def chosen_of(param: nn.Parameter) -> torch.Tensor:
    return param.detach()[:, COLUMNS] if param.dim() == 2 else param.detach()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("shape", [(5, 6), (7,)])
def test_chosen_columns_are_updated_as_by_torch_and_others_are_left(shape, offload):
    param, ours, chosen, theirs = twins(shape, offload=offload, bucket_size=1)
    before = param.detach().clone()
    for _ in range(4):
        chosen.grad = torch.randn_like(chosen)
        select(param, chosen.grad.clone())
        ours.step()
        theirs.step()
        assert param.selected_grad is None and param.temp_selected_param is None
    torch.testing.assert_close(chosen_of(param), chosen.detach())
    assert ours.state[param]["step"].item() == 4
    if len(shape) == 2:
        others = [1, 2, 5]
        assert torch.equal(param.detach()[:, others], before[:, others])


def test_a_step_starts_from_the_columns_that_were_kept():
    param, ours, chosen, theirs = twins((5, 6))
    select(param, torch.ones(5, 3))
    ours.temp_copy_param({0: [param]})
    param.data.zero_()  # as the host's older weights would
    chosen.grad = torch.ones(5, 3)
    ours.step()
    theirs.step()
    torch.testing.assert_close(chosen_of(param), chosen.detach())


def test_offloaded_moments_are_in_host_memory_between_steps_and_can_be_cleared():
    param, ours, _, _ = twins((5, 6), offload=True)
    select(param, torch.ones(5, 3))
    ours.step()
    assert param.exp_avg is None and param.exp_avg_cpu_data.shape == (5, 3)
    assert param.exp_avg_cpu_data.abs().sum() > 0
    ours.clear_selected_mv()
    assert param.exp_avg_cpu_data.abs().sum() == 0 and param.exp_avg_sq_cpu_data.abs().sum() == 0
    ours.copy_mv_from_cpu([param])
    param.exp_avg.fill_(2)
    ours.copy_mv_to_cpu([param])
    assert param.exp_avg is None and torch.equal(param.exp_avg_cpu_data, torch.full((5, 3), 2.0))


@pytest.mark.parametrize("offload", [False, True])
def test_the_steps_of_groups_use_their_settings(offload):
    first, second, idle = (nn.Parameter(torch.ones(2, 6)) for _ in range(3))
    groups = [{"params": [first], "lr": 0.0}, {"params": [second, idle], "lr": 0.1}]
    ours = ZenFlowSelectiveAdamW(groups, weight_decay=0.0, offload=offload)
    for param in (first, second):
        select(param, torch.ones(2, 3))
    ours.group_step({1: [second, idle]})
    assert first.selected_grad is not None and second.selected_grad is None
    torch.testing.assert_close(chosen_of(second), torch.full((2, 3), 0.9))
    ours.step()
    assert torch.equal(first.detach(), torch.ones(2, 6)) and torch.equal(idle.detach(), torch.ones(2, 6))


def test_cleared_moments_and_other_numbers_of_columns_start_again():
    param, ours, _, _ = twins((5, 6))
    select(param, torch.ones(5, 3))
    ours.step()
    ours.clear_selected_mv()
    assert ours.state[param]["exp_avg"].abs().sum() == 0
    param.selected_indices = torch.tensor([1])
    param.selected_grad = torch.ones(5, 1)
    ours.step()
    assert ours.state[param]["exp_avg"].shape == (5, 1)


def test_what_it_has_no_state_for_is_refused():
    with pytest.raises(ValueError, match="amsgrad"):
        ZenFlowSelectiveAdamW([nn.Parameter(torch.ones(2, 2))], amsgrad=True)

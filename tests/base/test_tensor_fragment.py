from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import deepspeed.utils as ds
from deepspeed.zero import tensor_fragment
from deepspeed.zero.states.fragments import write_pieces


class Access:
    """State of one parameter of shape [2, 3], of which this rank has the first four elements."""

    def __init__(self) -> None:
        self.master = torch.arange(6.0)
        self.exp_avg = torch.arange(6.0) * 10
        self.gradient: Tensor | None = torch.ones(6)
        self.published = 0

    def full_master(self, param: nn.Parameter) -> Tensor:
        return self.master.view(2, 3).clone()

    def set_full_master(self, param: nn.Parameter, value: Tensor) -> None:
        self.master.copy_(value.view(-1))
        self.published += 1

    def full_state(self, param: nn.Parameter, key: str) -> Tensor:
        assert key == "exp_avg"
        return self.exp_avg.view(2, 3).clone()

    def set_full_state(self, param: nn.Parameter, key: str, value: Tensor) -> None:
        self.exp_avg.copy_(value.view(-1))

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        return None if self.gradient is None else self.gradient.view(2, 3).clone()

    def set_full_gradient(self, param: nn.Parameter, value: Tensor) -> None:
        assert self.gradient is not None
        self.gradient.copy_(value.view(-1))

    def local_master(self, param: nn.Parameter) -> Tensor:
        return self.master[:4]

    def local_state(self, param: nn.Parameter, key: str) -> Tensor:
        return self.exp_avg[:4]

    def local_gradient(self, param: nn.Parameter) -> Tensor | None:
        return None if self.gradient is None else self.gradient[:4]

    def set_local_master(self, param: nn.Parameter, value: Tensor) -> None:
        write_pieces([self.master[:3], self.master[3:4]], value, "part of the master weight")

    def set_local_state(self, param: nn.Parameter, key: str, value: Tensor) -> None:
        write_pieces([self.exp_avg[:4]], value, f"part of {key!r}")

    def set_local_gradient(self, param: nn.Parameter, value: Tensor) -> None:
        pieces = None if self.gradient is None else [self.gradient[:4]]
        write_pieces(pieces, value, "part of the gradient")


@pytest.fixture
def param() -> nn.Parameter:
    made = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    made._ds_state_access = Access()  # type: ignore[attr-defined]
    return made


def access(param: nn.Parameter) -> Access:
    return param._ds_state_access  # type: ignore[attr-defined]


def test_whole_tensors(param: nn.Parameter) -> None:
    new = torch.full((2, 3), 7.0)
    assert torch.equal(ds.safe_get_full_fp32_param(param), torch.arange(6.0).view(2, 3))
    ds.safe_set_full_fp32_param(param, new)
    assert torch.equal(access(param).master, new.view(-1)) and access(param).published == 1
    ds.safe_set_full_optimizer_state(param, new, "exp_avg")
    assert torch.equal(ds.safe_get_full_optimizer_state(param, "exp_avg"), new)
    ds.safe_set_full_grad(param, new)
    assert torch.equal(ds.safe_get_full_grad(param), new)


def test_local_parts_are_live(param: nn.Parameter) -> None:
    new = torch.tensor([9.0, 8.0, 7.0, 6.0])
    ds.safe_set_local_fp32_param(param, new)
    ds.safe_set_local_optimizer_state(param, new, "exp_avg")
    ds.safe_set_local_grad(param, new.view(2, 2))
    assert access(param).master.tolist() == [9, 8, 7, 6, 4, 5]
    assert access(param).exp_avg.tolist() == [9, 8, 7, 6, 40, 50]
    assert access(param).gradient.tolist() == [9, 8, 7, 6, 1, 1]  # type: ignore[union-attr]
    assert torch.equal(ds.safe_get_local_fp32_param(param), new)
    assert torch.equal(ds.safe_get_local_optimizer_state(param, "exp_avg"), new)
    assert torch.equal(ds.safe_get_local_grad(param), new)


def test_many_gradients_at_once(param: nn.Parameter) -> None:
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([1.0, 2.0])
    without = nn.Parameter(torch.zeros(2))
    ds.safe_update_full_grad_vectorized([param, plain, without], lambda grad, p: grad * p.numel())
    assert access(param).gradient.tolist() == [6.0] * 6  # type: ignore[union-attr]
    assert plain.grad.tolist() == [2.0, 4.0] and without.grad is None

    def in_place(grad: Tensor, p: nn.Parameter) -> None:
        grad.add_(1)

    ds.safe_update_full_grad_vectorized([param, plain], in_place)
    assert access(param).gradient.tolist() == [7.0] * 6  # type: ignore[union-attr]
    assert plain.grad.tolist() == [3.0, 5.0]


def test_gradient_that_is_not_there(param: nn.Parameter) -> None:
    access(param).gradient = None
    assert ds.safe_get_full_grad(param) is None and ds.safe_get_local_grad(param) is None
    with pytest.raises(ValueError, match="no part of the gradient"):
        ds.safe_set_local_grad(param, torch.ones(4))


def test_plain_parameter_keeps_its_own_state() -> None:
    plain = nn.Parameter(torch.zeros(2, 3))
    assert ds.safe_get_full_grad(plain) is None and ds.safe_get_full_fp32_param(plain) is None
    assert ds.safe_get_local_fp32_param(plain) is None and ds.safe_get_local_grad(plain) is None
    assert ds.safe_get_full_optimizer_state(plain, "exp_avg") is None
    with pytest.raises(ValueError, match="no gradient"):
        ds.safe_set_full_grad(plain, torch.ones(2, 3))
    plain.sum().backward()
    assert ds.safe_get_full_grad(plain) is plain.grad
    ds.safe_set_full_grad(plain, torch.full((2, 3), 4.0))
    assert plain.grad is not None and plain.grad.sum() == 24


@pytest.mark.parametrize(
    "name", ["safe_set_full_fp32_param", "safe_set_local_fp32_param", "safe_set_local_grad"]
)
def test_writing_state_that_nobody_keeps(name: str) -> None:
    with pytest.raises(ValueError, match=r"No engine keeps state .*\(2, 3\)"):
        getattr(ds, name)(nn.Parameter(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_wrong_shapes(param: nn.Parameter) -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\), but the given value has \(3, 2\)"):
        ds.safe_set_full_fp32_param(param, torch.zeros(3, 2))
    with pytest.raises(ValueError, match="has 4 elements, but the value has 6"):
        ds.safe_set_local_fp32_param(param, torch.zeros(6))
    param.data = torch.empty(0)  # as ZeRO stage 3 leaves it
    param.ds_shape = torch.Size([2, 3])  # type: ignore[attr-defined]
    ds.safe_set_full_fp32_param(param, torch.zeros(2, 3))


@pytest.mark.parametrize("name", ["safe_set_full_optimizer_state", "safe_set_local_optimizer_state"])
def test_swapped_arguments_are_named(param: nn.Parameter, name: str) -> None:
    with pytest.raises(ValueError, match=r"\(param, value, optim_state_key\).* not \(param, str, Tensor\)"):
        getattr(ds, name)(param, "exp_avg", torch.zeros(2, 3))


def test_as_methods(param: nn.Parameter) -> None:
    get: Any = tensor_fragment.get_full_hp_param
    assert torch.equal(get(param), access(param).full_master(param))
    tensor_fragment.set_full_hp_param(param, torch.ones(2, 3), "exp_avg")
    tensor_fragment.set_full_hp_param(param, torch.zeros(2, 3))
    tensor_fragment.set_full_hp_grad(param, torch.zeros(2, 3))
    assert torch.equal(get(param, "exp_avg"), torch.ones(2, 3)) and not access(param).master.any()
    assert not access(param).gradient.any()  # type: ignore[union-attr]
    assert torch.equal(cast(Tensor, tensor_fragment.get_full_hp_grad(param)), torch.zeros(2, 3))

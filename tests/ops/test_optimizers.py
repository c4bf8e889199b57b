"""Every optimizer of ours against torch.optim (or the paper), and against itself on every path it has."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from deepspeed.ops import native
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import FusedLion
from deepspeed.ops.sgd import SGD
from tests.ops.cases import CASES, DTYPES, ELEMENTWISE, SHAPES, Case, gradients, parameters, same_bits, train


def _double_oracle(case: Case, steps: int = 4) -> list[torch.Tensor]:
    params = [torch.nn.Parameter(p.detach().double()) for p in parameters()]
    optimizer = case.oracle(params)
    for step in range(steps):
        for p, g in zip(params, gradients(parameters(), step), strict=True):
            p.grad = g.double()
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle_in_fp64(case: Case, isa: str) -> None:
    params = parameters()
    train(case.ours(params), params)
    for p, expected in zip(params, _double_oracle(case), strict=True):
        torch.testing.assert_close(p.detach().double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_that_a_script_empties_begin_anew(case: Case) -> None:
    """As torch's do: in place, for an optimizer whose state is reset during training."""
    emptied, new = parameters(), parameters()
    optimizer = case.ours(emptied)
    train(optimizer, emptied)
    for state in optimizer.state.values():
        state.clear()
    with torch.no_grad():
        for p, q in zip(new, emptied, strict=True):
            p.copy_(q)
    train(optimizer, emptied)
    train(case.ours(new), new)
    assert all(map(same_bits, emptied, new))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_path_gives_the_same_bits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None:
        pytest.skip("built without native kernels")
    native_params, torch_params = parameters(), parameters()
    ours, fallback = case.ours(native_params), case.ours(torch_params)
    train(ours, native_params)
    monkeypatch.setattr(native, "library", lambda: None)
    train(fallback, torch_params)
    for p, q in zip(native_params, torch_params, strict=True):
        assert same_bits(p, q)
        for name in ours.state_names:
            if name in ours.state[p]:
                assert same_bits(ours.state[p][name], fallback.state[q][name])
        assert ours.state[p]["step"] == fallback.state[q]["step"] == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_narrow_parameters_and_states_agree_on_every_path(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16-bit parameters, gradients, states and copies: instruction sets, threads and PyTorch give the same bits."""
    lib = native.library()
    if lib is None:
        pytest.skip("built without native kernels")
    before = lib.ds_isa()
    paths: list[tuple[Any, int, int]] = [(lib, isa, n) for isa in range(before + 1) for n in (1, 2)]
    results = []
    try:
        for library, isa, threads in [*paths, (None, before, 1)]:
            monkeypatch.setattr(native, "library", lambda library=library: library)
            lib.ds_set_isa(isa)
            torch.set_num_threads(threads)
            params = [p.detach() for p in parameters(dtype, shapes=[*SHAPES, (70_001,)])]
            copies = [torch.zeros_like(p, dtype=torch.float16) for p in params]
            optimizer = case.ours(params)
            group = optimizer.param_groups[0]
            group["fp32_optimizer_states"] = False
            for step in range(3):
                grads = gradients(params, step, dtype)
                optimizer.multi_tensor_step(group, params, grads, grad_scale=0.5, low_precision=copies)
            states = [
                optimizer.state[p][n]
                for p in params
                for n in optimizer.state_names
                if n in optimizer.state[p]
            ]
            assert all(state.dtype is dtype for state in states)
            results.append([*params, *states, *copies])
    finally:
        lib.ds_set_isa(before)
    for other in results[1:]:
        assert all(same_bits(p, q) for p, q in zip(results[0], other, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_instruction_sets_and_threads_agree_bit_for_bit(case: Case) -> None:
    lib = native.library()
    if lib is None:
        pytest.skip("built without native kernels")
    before = lib.ds_isa()
    shapes = [*SHAPES, (300_001,)]  # large enough to be shared by threads
    results = []
    try:
        for isa in range(before + 1):
            for threads in (1, 2, 3):
                assert lib.ds_set_isa(isa) == isa
                torch.set_num_threads(threads)
                params = parameters(shapes=shapes)
                train(case.ours(params), params, steps=2)
                results.append(params)
    finally:
        lib.ds_set_isa(before)
    for other in results[1:]:
        assert all(same_bits(p, q) for p, q in zip(results[0], other, strict=True))


@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("path", ["native", "torch"])
def test_bits_depend_neither_on_cuts_nor_on_alignment(
    case: Case, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    whole = parameters(shapes=[(20011,)])
    train(case.ours(whole), whole)
    for cuts in ([0, 7, 1031, 20011], [0, 1, 16, 17, 4099, 20010, 20011]):
        memory = torch.zeros(20011 + 64)
        start = parameters(shapes=[(20011,)])[0].detach()
        pieces = []
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
            view = memory[a + i : b + i]  # every piece at another alignment
            pieces.append(view.copy_(start[a:b]))
        optimizer = case.ours(pieces)
        group = optimizer.param_groups[0]
        for step in range(4):
            (grad,) = gradients(whole, step)
            grads = [grad[a:b].clone() for a, b in zip(cuts, cuts[1:], strict=False)]
            optimizer.multi_tensor_step(group, pieces, grads)
        assert same_bits(torch.cat(pieces), whole[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_low_precision_operands(
    case: Case, dtype: torch.dtype, grad_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16-bit parameters are updated in fp32 and rounded to nearest: what fp32 gives from the same inputs."""
    for library in ({native.library, lambda: None}) if native.library() else [lambda: None]:
        monkeypatch.setattr(native, "library", library)
        narrow = [p.detach() for p in parameters(dtype)]
        wide = [p.float() for p in narrow]
        ours, reference = case.ours(narrow), case.ours(wide)
        for step in range(3):
            grads = gradients(narrow, step, grad_dtype)
            for p, q in zip(narrow, wide, strict=True):
                q.copy_(p.float())
            ours.multi_tensor_step(ours.param_groups[0], narrow, grads, grad_scale=0.37)
            reference.multi_tensor_step(reference.param_groups[0], wide, [g.float() * 0.37 for g in grads])
            for p, q in zip(narrow, wide, strict=True):
                assert same_bits(p, q.to(dtype))
        for p in narrow:
            for name in ours.state_names:
                assert ours.state[p].get(name, torch.zeros(())).dtype is torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_copy_out_is_the_rounded_parameter(case: Case, dtype: torch.dtype, isa: str) -> None:
    params, plain = parameters(), parameters()
    copies: list[torch.Tensor | None] = [torch.full_like(p, 7.0, dtype=dtype).detach() for p in params]
    copies[1] = None
    ours, reference = case.ours(params), case.ours(plain)
    for step in range(3):
        grads = gradients(params, step)
        ours.multi_tensor_step(ours.param_groups[0], params, grads, low_precision=copies)
        reference.multi_tensor_step(reference.param_groups[0], plain, grads)
        for p, q, copied in zip(params, plain, copies, strict=True):
            assert same_bits(p, q)
            assert copied is None or same_bits(copied, p.detach().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("adamw", "lion", "lamb")], ids=str)
def test_copies_of_large_tensors_at_any_alignment(case: Case, dtype: torch.dtype, isa: str) -> None:
    """From 4M elements on, copies are written past the cache: the same values, and no other memory changes."""
    torch.set_num_threads(2)
    numels = [3_000_001, 1_300_000]
    params = [torch.full((n,), 0.5).index_fill_(0, torch.arange(0, n, 7), -3.0) for n in numels]
    grads = [torch.linspace(-1, 1, n) for n in numels]
    memory = [torch.full((n + 12,), 7.0, dtype=dtype) for n in numels]
    copies = [whole[shift : shift + n] for whole, shift, n in zip(memory, (3, 8), numels, strict=True)]
    optimizer = case.ours(params)
    optimizer.multi_tensor_step(optimizer.param_groups[0], params, grads, low_precision=copies)
    for p, copied, whole, shift in zip(params, copies, memory, (3, 8), strict=True):
        assert same_bits(copied, p.to(dtype))
        assert (whole[:shift] == 7).all() and (whole[shift + len(p) :] == 7).all()


@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_non_finite_gradients_stay_where_they_are(case: Case, isa: str) -> None:
    params, clean = parameters(), parameters()
    ours, reference = case.ours(params), case.ours(clean)
    grads = gradients(params, 0)
    reference.multi_tensor_step(reference.param_groups[0], clean, grads)
    dirty = [g.clone() for g in grads]
    dirty[0][5], dirty[0][16], dirty[1][3, 3] = float("nan"), float("inf"), -float("inf")
    ours.multi_tensor_step(ours.param_groups[0], params, dirty)
    for p, q, g in zip(params, clean, dirty, strict=True):
        finite = g.isfinite()
        assert torch.equal(p.detach()[finite], q.detach()[finite])
    assert params[0][5].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cpu_adam_keeps_states_in_the_dtype_asked_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, twins = ([p.detach() for p in parameters(dtype)] for _ in range(2))
    arguments: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = DeepSpeedCPUAdam(params, fp32_optimizer_states=False, **arguments)
    fallback = DeepSpeedCPUAdam(twins, fp32_optimizer_states=False, **arguments)
    exact = [torch.nn.Parameter(p.double()) for p in params]
    oracle = torch.optim.AdamW(exact, **arguments)
    library = native.library
    for _ in range(3):
        grads = [torch.randn_like(p) for p in params]
        optimizer.multi_tensor_step(optimizer.param_groups[0], params, grads)
        monkeypatch.setattr(native, "library", lambda: None)
        fallback.multi_tensor_step(fallback.param_groups[0], twins, grads)
        monkeypatch.setattr(native, "library", library)
        for p, g in zip(exact, grads, strict=True):
            p.grad = g.double()
        oracle.step()
    for p, q, expected in zip(params, twins, exact, strict=True):
        for name in optimizer.state_names:
            assert optimizer.state[p][name].dtype is dtype
            assert same_bits(optimizer.state[p][name], fallback.state[q][name])
        assert same_bits(p, q)
        torch.testing.assert_close(p.double(), expected.detach(), rtol=0.02, atol=0.02)


def test_groups_differ_and_unused_parameters_are_left_out() -> None:
    params, oracle_params = parameters(), parameters()

    def groups(ps: list[torch.nn.Parameter]) -> list[dict]:
        return [{"params": ps[:2], "weight_decay": 0.0}, {"params": ps[2:], "lr": 0.5}]

    ours = FusedAdam(groups(params), lr=1e-2, weight_decay=0.1)
    oracle = torch.optim.AdamW(groups(oracle_params), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        for ps in (params, oracle_params):
            for i, (p, g) in enumerate(zip(ps, gradients(ps, step), strict=True)):
                p.grad = None if i == 5 and step % 2 else g  # has seen fewer updates than the others
        ours.step()
        oracle.step()
    assert ours.state[params[5]]["step"] == 2
    for p, q in zip(params, oracle_params, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_dict_round_trip(case: Case) -> None:
    params, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    straight, saved = case.ours(params), case.ours(other)
    train(straight, params, steps=2)
    train(saved, other, steps=2)
    resumed_params = [torch.nn.Parameter(p.detach().clone()) for p in other]
    resumed = case.ours(resumed_params)
    resumed.load_state_dict(pickle.loads(pickle.dumps(saved.state_dict())))
    for q, r in zip(other, resumed_params, strict=True):
        for name in saved.state[q]:
            assert same_bits(saved.state[q][name], resumed.state[r][name])
            assert saved.state[q][name].data_ptr() != resumed.state[r][name].data_ptr() or r.numel() == 0
    train(straight, params, steps=2)
    train(resumed, resumed_params, steps=2)
    assert all(same_bits(p, q) for p, q in zip(params, resumed_params, strict=True))


@pytest.mark.parametrize("case", [c for c in CASES if "lion" not in c.name and c.name != "lamb"], ids=str)
def test_state_dicts_of_torch_can_be_loaded(case: Case) -> None:
    theirs, ours_params = parameters(), parameters()
    oracle = case.oracle(theirs)
    train(oracle, theirs, steps=2)
    with torch.no_grad():
        for p, q in zip(ours_params, theirs, strict=True):
            p.copy_(q)
    ours = case.ours(ours_params)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in ours.param_groups]
    ours.load_state_dict(oracle.state_dict())
    for group, values in zip(ours.param_groups, settings, strict=True):
        group.update(values)
    train(oracle, theirs, steps=1)
    train(ours, ours_params, steps=1)
    for p, q in zip(ours_params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rate_may_be_a_tensor(case: Case) -> None:
    params, twins = parameters(), parameters()
    ours, twin = case.ours(params), case.ours(twins)
    ours.param_groups[0]["lr"], twin.param_groups[0]["lr"] = torch.tensor(0.5), 0.5
    train(ours, params, steps=1)
    train(twin, twins, steps=1)
    assert all(same_bits(p, q) for p, q in zip(params, twins, strict=True))


def test_tables_follow_replaced_tensors() -> None:
    """State, data or gradients at a new address, or another dtype: the next step uses what is there now."""
    params, twin_params = parameters(), parameters()
    ours, twin = FusedAdam(params, lr=1e-2), FusedAdam(twin_params, lr=1e-2)
    for step in range(6):
        for ps in (params, twin_params):
            for p, g in zip(ps, gradients(ps, step), strict=True):
                p.grad = g
        if step == 2:
            for p in params:
                p.data = p.data.clone()
        if step == 3:
            for p in params:
                ours.state[p]["exp_avg"] = ours.state[p]["exp_avg"].clone()
                ours.state[p]["step"] = int(ours.state[p]["step"])
        if step == 4:
            ours = copy.deepcopy(ours)
            params = ours.param_groups[0]["params"]
            for p, g in zip(params, gradients(params, step), strict=True):
                p.grad = g
        ours.step()
        twin.step()
    assert all(same_bits(p, q) for p, q in zip(params, twin_params, strict=True))


def test_strided_and_double_tensors_take_the_torch_path() -> None:
    weight = torch.randn(8, 4, 3, 3)
    theirs = torch.nn.Parameter(weight.clone().to(memory_format=torch.channels_last))
    strided = torch.nn.Parameter(theirs.detach().clone(memory_format=torch.preserve_format))
    assert not strided.is_contiguous()
    double = torch.nn.Parameter(weight.double())
    ours, oracle = (
        FusedAdam([strided, double], lr=1e-2),
        torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.0),
    )
    for step in range(3):
        (grad,) = gradients([weight], step)
        strided.grad, theirs.grad, double.grad = grad, grad.clone(), grad.double()
        ours.step()
        oracle.step()
    torch.testing.assert_close(strided, theirs, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(double.float(), theirs.contiguous(), rtol=2e-6, atol=2e-6)
    assert ours.state[double]["exp_avg"].dtype is torch.float64


def test_moments_of_two_dtypes_take_the_torch_path() -> None:
    params, twins = parameters(), parameters()
    ours, twin = FusedAdam(params, lr=1e-2), FusedAdam(twins, lr=1e-2)
    for p in params:
        state = ours.state_for(p, ours.param_groups[0])
        state["exp_avg"] = state["exp_avg"].double()
    train(ours, params)
    train(twin, twins)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_sgd_is_a_torch_sgd() -> None:
    """Scripts look for the kind; groups have no entries of torch's, not after a copy or loading either."""
    optimizer = SGD([torch.ones(4, requires_grad=True)], lr=0.1, momentum=0.9)
    assert isinstance(optimizer, torch.optim.SGD)
    keys = set(optimizer.param_groups[0])
    other = copy.deepcopy(optimizer)
    other.load_state_dict(optimizer.state_dict())
    assert set(other.param_groups[0]) == keys == {"params", *optimizer.defaults}
    assert "maximize" not in keys


def test_stale_graphs_are_errors_after_a_step() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = SGD([weight], lr=0.1)
    hidden = (torch.randn(2, 4) @ weight).relu() @ weight
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


def test_closure_and_documented_refusals() -> None:
    params = parameters()
    optimizer = FusedLion(params, lr=1e-3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([(p**2).sum() for p in params]).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedAdam(params, amsgrad=True)
    with pytest.raises(RuntimeError, match="output_params"):
        optimizer.step(output_params=[])
    with pytest.raises(ValueError, match="nesterov"):
        SGD(params, nesterov=True)
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        FusedAdam(embedding.parameters()).step()


def test_wrong_lists_are_refused() -> None:
    p = torch.zeros(4)
    optimizer = FusedAdam([p])
    group = optimizer.param_groups[0]
    with pytest.raises(ValueError, match="same length"):
        optimizer.multi_tensor_step(group, [p], [])
    with pytest.raises(ValueError, match="3 elements"):
        optimizer.multi_tensor_step(group, [p], [torch.zeros(3)])
    optimizer.multi_tensor_step(group, [], [])

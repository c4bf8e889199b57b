"""Small documented helpers: each against plain Python or torch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.base import compiler
from deepspeed.comm import documented_groups as bwc
from deepspeed.comm import documented_groups as groups
from deepspeed.comm.sparse_tensor import SparseTensor
from deepspeed.compat import offload_states as optimizer_states
from deepspeed.compat import runtime_utils as ds
from deepspeed.compat import torch_autocast
from deepspeed.compat import zero_utils as zero
from deepspeed.compression.helper import convert_conv1d_to_linear, recursive_getattr, recursive_setattr
from deepspeed.config import getters as config_getters
from deepspeed.config.deepspeed_config import DeepSpeedConfig
from tests.pool import distributed

# --- Partitioned tensors --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 3), (2,), (), (0, 4)])
@distributed(world_size=4)
def test_a_partitioned_tensor_comes_back_whole(shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(math.prod(shape))).view(shape)
    group = dist.new_group(ranks=range(4))
    part = ds.PartitionedTensor(whole, group)
    bounds = ds.partition_uniform(whole.numel(), 4)
    begin, end = bounds[dist.get_rank()], bounds[dist.get_rank() + 1]
    assert torch.equal(part.data(), whole.reshape(-1)[begin:end])
    assert part.local_size() == (end - begin,) and part.full_size() == list(shape)
    assert torch.equal(part.full(), whole)
    again = ds.PartitionedTensor.from_meta(part.to_meta(), part.data(), group)
    assert torch.equal(again.full(), whole) and again.full().shape == whole.shape
    with pytest.raises(RuntimeError, match="elements"):
        ds.PartitionedTensor.from_meta(part.to_meta(), torch.zeros(100), group)


# --- Gradients ------------------------------------------------------------------------------------


def with_grads(*grads: list[float]) -> list[torch.Tensor]:
    params = [torch.zeros(len(grad), requires_grad=True) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.tensor(grad)
    return params


@distributed(world_size=2)
def test_an_overflow_on_one_rank_is_one_on_all() -> None:
    params = with_grads([1.0, float("nan") if dist.get_rank() == 1 else 2.0])
    check = ds.CheckOverflow(param_groups=[params])
    assert check.has_overflow_serial(params) is (dist.get_rank() == 1)
    assert check.check() is check.has_overflow(params) is True
    assert check.check([with_grads([1.0])]) is False


@distributed(world_size=2)
def test_experts_that_differ_between_ranks_are_clipped_alike() -> None:
    groups._create_expert_and_data_parallel(2)
    dense, expert = with_grads([3.0], [4.0 * dist.get_rank()])
    expert.allreduce = False  # type: ignore[attr-defined]
    assert ds.clip_grad_norm_([dense, expert], 2.0).item() == 4.0  # the mean of 3 and 5
    assert dense.grad is not None
    assert dense.grad.item() == pytest.approx(1.5)


def test_norms_of_gradients() -> None:
    params = with_grads([3.0, 0.0, 4.0], [0.0, 12.0])
    assert ds.get_weight_norm([torch.tensor([3.0, 4.0])]) == 5.0
    assert ds.DummyOptim(params).param_groups[0]["params"] is params


def test_tensors_are_aligned() -> None:
    assert [t.numel() for t in ds.align_dense_tensors([torch.ones(5), torch.ones(2)], 4)] == [5, 2, 1]
    assert len(ds.align_dense_tensors([torch.ones(8)], 4)) == 1


def test_tensors_and_other_values() -> None:
    from deepspeed.transforms.recompute import checkpointing

    weight = torch.ones(2, requires_grad=True)
    given = (weight * 2, "text", torch.zeros(1), None)
    detached = checkpointing.detach_variable(given)
    assert detached[1::2] == ("text", None)
    assert detached[0].is_leaf and detached[0].requires_grad and not detached[2].requires_grad
    with pytest.raises(TypeError, match="not a list"):
        checkpointing.detach_variable([weight])


def test_decorators_of_the_compiler() -> None:
    def two() -> int:
        return 2

    assert compiler.enable()(two) is compiler.enable(min_version="2.0")(two) is two
    assert compiler.enable(min_version="99.0")(two) is not two
    assert compiler.enable(min_version="99.0")(two)() == 2


def test_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch_autocast.get_autocast_dtype() is torch.float16


@distributed(world_size=2)
def test_flat_groups_are_gathered() -> None:
    rank, group = dist.get_rank(), dist.new_group(ranks=range(2))
    flat = torch.full((10,), -1.0)
    slices = list(flat.chunk(2))
    slices[rank].copy_(torch.arange(5.0) + 5 * rank)
    ds.all_gather_dp_groups([flat], [slices], [group], start_alignment_factor=2, allgather_bucket_size=4)
    assert torch.equal(flat, torch.arange(10.0))


# --- ZeRO's ---------------------------------------------------------------------------------------


def test_zero_helpers() -> None:
    weight = [nn.Parameter(torch.ones(3))]
    assert zero.is_zero_supported_optimizer(torch.optim.AdamW(weight))


# --- Compression's --------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """As GPT-2 has it: weight (in, out)."""

    def __init__(self, out: int, inside: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inside, out)), nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def test_submodules_by_dotted_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(3, 3)])}))
    assert recursive_getattr(model, "0.weight") is model[0].weight
    assert recursive_getattr(model, "1.inner.0") is model[1]["inner"][0]
    new = nn.Linear(3, 5)
    recursive_setattr(model, "1.inner.0", new)
    recursive_setattr(model, "0", nn.Identity())
    assert model[1]["inner"][0] is new and isinstance(model[0], nn.Identity)
    with pytest.raises(AttributeError):
        recursive_getattr(model, "1.outer")


def test_conv1d_becomes_a_linear_that_computes_the_same() -> None:
    model = nn.Sequential(Conv1D(5, 4), nn.Tanh(), nn.Sequential(Conv1D(2, 5)))
    model[0].bias.requires_grad = False
    x = torch.randn(3, 4)
    expected, state = model(x), torch.get_rng_state()
    assert convert_conv1d_to_linear(model, Conv1D) is model
    assert type(model[0]) is type(model[2][0]) is nn.Linear and not model[0].bias.requires_grad
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(model(x), expected)


# --- torch, bytes, numbers, model-parallel units ---------------------------------------------------


def test_model_parallel_units_of_all_times() -> None:
    units: list[Any] = [
        SimpleNamespace(get_model_parallel_rank=lambda: 3),
        SimpleNamespace(get_tensor_model_parallel_rank=lambda: 3, get_model_parallel_rank=lambda: 9),
        SimpleNamespace(get_slice_parallel_rank=lambda: 3, get_model_parallel_rank=lambda: 9),
    ]
    assert [bwc.bwc_tensor_model_parallel_rank(mpu) for mpu in units] == [3, 3, 3]
    pipeline: Any = SimpleNamespace(get_pipe_parallel_world_size=lambda: 4)
    assert bwc.bwc_pipeline_parallel_world_size(pipeline) == 4
    assert bwc.bwc_tensor_model_parallel_rank() == 0 and bwc.bwc_tensor_model_parallel_world_size() == 1


# --- Config getters --------------------------------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [
    {"train_batch_size": 4},
    {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.25,
        "steps_per_print": 7,
        "prescale_gradients": True,
        "sparse_gradients": True,
        "communication_data_type": "bf16",
        "dump_state": True,
        "wall_clock_breakdown": True,
        "dataloader_drop_last": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "torch_autocast": {
            "enabled": True,
            "dtype": "float16",
            "lower_precision_safe_modules": ["torch.nn.Linear"],
        },
        "checkpoint": {"tag_validation": "Fail", "parallel_write": {"pipeline_stage": True}},
    },
]


@pytest.mark.parametrize("config", CONFIGS)
def test_getters_agree_with_the_config_object(config: dict[str, Any]) -> None:
    whole = DeepSpeedConfig(config)
    assert config_getters.get_gradient_clipping(config) == whole.gradient_clipping
    assert config_getters.get_log_level(config) == whole.log_level


def test_getters_of_sections() -> None:
    getters = config_getters
    assert getters.get_sparse_attention({}) is None
    sparse = getters.get_sparse_attention({"sparse_attention": {"mode": "bigbird", "block": 32}})
    assert sparse is not None and (sparse["mode"], sparse["block"], sparse["num_sliding_window_blocks"]) == (
        "bigbird",
        32,
        3,
    )
    with pytest.raises(NotImplementedError, match="'star' is unknown: use one of dense"):
        getters.get_sparse_attention({"sparse_attention": {"mode": "star"}})


# --- Running backwards, sparse rows, devices of states --------------------------------------------


def test_parameters_that_a_backward_reaches_are_counted() -> None:
    used, unused = nn.Linear(3, 2), nn.Linear(3, 2)
    params = [
        *used.parameters(),
        *unused.parameters(),
        nn.Parameter(torch.ones(1), requires_grad=False),
        None,
    ]
    counts: list[int] = []
    used.bias.register_hook(lambda grad: counts.append(ds.count_used_parameters_in_backward(params)))
    used(torch.ones(1, 3)).sum().backward()
    assert ds.check_internal_apis_for_count_used_parameters() and counts == [2]
    with pytest.raises(RuntimeError, match="must be called during backward execution"):
        ds.count_used_parameters_in_backward(params)


def test_where_torch_cannot_tell_all_parameters_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds, "check_internal_apis_for_count_used_parameters", lambda: False)
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    assert ds.count_used_parameters_in_backward([*layer.parameters(), "no tensor"]) == 1


def test_rows_of_sparse_tensors() -> None:
    torch.manual_seed(1)
    dense = torch.zeros(6, 3)
    dense[1], dense[4] = torch.randn(3), torch.tensor([1.0, -1.0, 0.0])
    rows = SparseTensor(dense)
    assert rows.indices is not None and rows.indices.tolist() == [1, 4]
    assert torch.equal(rows.to_dense(), dense) and torch.equal(rows.to_coo_tensor().to_dense(), dense)
    assert rows.sparse_size() == (8, 18) and SparseTensor.type() == "deepspeed.SparseTensor"
    other = torch.zeros(6, 3)
    other[4:] = 2.0
    rows.add(SparseTensor(other.to_sparse(1)))
    assert torch.allclose(rows.to_dense(), dense + other)
    with pytest.raises(ValueError, match="shape"):
        rows.add(SparseTensor(torch.ones(2, 3)))
    with pytest.raises(ValueError, match="empty"):
        SparseTensor().to_dense()


@distributed(world_size=2)
def test_norms_with_experts_on_other_ranks() -> None:
    everyone = dist.new_group([0, 1])
    assert ds.get_norm_with_moe_layers_fast(torch.tensor(float(dist.get_rank())), everyone) == 0.5


def test_states_of_an_adam_move_and_stay_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no second device here: what would be moved is counted up instead.
    monkeypatch.setattr(optimizer_states, "_moved", lambda value, device, pin, non_blocking: value + 1)
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.zeros(3)
    adam = torch.optim.Adam([weight], amsgrad=True)
    adam.step()
    state, before = adam.state[weight], dict(adam.state[weight])
    moments = {"exp_avg", "exp_avg_sq"}
    for move in (ds.offload_adam_states, ds.reload_adam_states):
        old = {key: value.clone() for key, value in state.items()}
        move(adam, "cpu")
        assert {key for key in state if not torch.equal(state[key], old[key])} == moments
        assert all(state[key] is before[key] for key in before)
    for move in (optimizer_states.offload_optimizer_states, optimizer_states.reload_optimizer_states):
        old = {key: value.clone() for key, value in state.items()}
        move(adam, "cpu")
        assert all(torch.equal(state[key], old[key] + 1) and state[key] is before[key] for key in before)


def test_values_that_are_not_finite_are_masked() -> None:
    norms = torch.tensor([float("nan"), float("inf"), float("-inf"), 2.0])
    ds.mask_nan_or_inf_with_val_inplace(norms, device=norms.device, val=1.5)
    assert norms.tolist() == [1.5, 1.5, 1.5, 2.0]


def test_parameters_summed_in_the_dtype_of_autocast() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    torch_autocast.init_autocast_params(model, torch.bfloat16, None)
    low, norm = model[0].weight, model[1].weight
    assert torch_autocast.has_comm_dtype(low) and not torch_autocast.has_comm_dtype(norm)
    assert torch_autocast.get_comm_dtype(norm) is torch.float32
    assert torch_autocast.get_comm_dtype(low) is torch.bfloat16
    assert "torch.nn.Linear" in torch_autocast.get_default_autocast_lower_precision_modules()

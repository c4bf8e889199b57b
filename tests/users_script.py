# pyright: strict
"""Train, save, load and serve, as a typed script of a user would."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import FusedLion
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups, logger, safe_get_full_fp32_param, safe_get_full_grad, set_z3_leaf_modules
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.experts = MoE(hidden_size=8, expert=nn.Linear(8, 8), num_experts=2, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.experts(self.first(x))
        return out[0].sum()


def main() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    device = torch.device(get_accelerator().current_device_name())
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        net = Net()
    set_z3_leaf_modules(net, [MoE])
    grouped = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(net.parameters()), "name": "all"}
    )
    optimizer = FusedAdam(net.parameters(), lr=1e-3)
    print(grouped, DeepSpeedCPUAdam, FusedLion, device, args)
    data = TensorDataset(torch.ones(4, 8))
    engine, wrapped, loader, scheduler = deepspeed.initialize(
        model=net, optimizer=optimizer, training_data=data, lr_scheduler=WarmupLR(optimizer), config="ds.json"
    )
    assert loader is not None
    for (batch,) in loader:
        loss = engine(batch.to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary() and dist.get_rank() == 0:
            logger.info("%s %s", engine.get_lr(), engine.get_global_grad_norm())
    with deepspeed.zero.GatheredParameters(net.first.weight, modifier_rank=0):
        net.first.weight.data.zero_()
    value = safe_get_full_fp32_param(net.first.weight)
    gradient = safe_get_full_grad(net.first.weight)
    if value is not None and gradient is not None:
        print((value * gradient).sum().item())
    engine.save_checkpoint("out", tag="last", client_state={"epoch": 1})
    path, state = engine.load_checkpoint("out")
    engine.save_16bit_model("out")
    print(
        path,
        state["epoch"] if state else 0,
        wrapped,
        scheduler,
        get_fp32_state_dict_from_zero_checkpoint("out"),
    )
    with engine.no_sync():
        engine.backward(engine(torch.ones(2, 8)))
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.SUM)
    dist.barrier()
    print(groups.get_data_parallel_world_size(), DeepSpeedZeroOptimizer_Stage3, DistributedAttention)
    checkpointing.configure(None, deepspeed_config="ds.json")
    print(checkpointing.checkpoint(net.first, torch.ones(1, 8)))
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    flops, macs, parameters = get_model_profile(net, input_shape=(1, 8))
    print(flops, macs, parameters, profiler.get_total_flops())


def pipeline() -> None:
    layers = [LayerSpec(nn.Linear, 8, 8), TiedLayerSpec("e", nn.Linear, 8, 8)]
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss())
    engine, _, _, _ = deepspeed.initialize(model=module, config={"train_batch_size": 4})
    print(engine.train_batch(), engine.eval_batch(iter([])))


def serve() -> None:
    engine = deepspeed.init_inference(nn.Linear(8, 8), dtype=torch.float32, tensor_parallel={"tp_size": 1})
    print(engine(torch.ones(1, 8)), engine.module)


if __name__ == "__main__":
    main()

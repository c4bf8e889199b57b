"""Training cases for the simulated GPU and the host, one process (or rank) for all of them.

    python -m tests.pretended_gpu.cases gpu|host NAME...

prints a line for each, with the name and the numbers as JSON. Ranks find each other through the environment.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__" and sys.argv[1] == "gpu":
    from tests import pretended_gpu

    pretended_gpu.install()

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.base.accelerator import get_accelerator

MARK = "numbers of "
WIDTH, BATCH, STEPS = 16, 4, 3
HOST = {"device": "cpu"}
PINNED = {"device": "cpu", "pin_memory": True}
ALL_GATHERED = {"stage3_param_persistence_threshold": 0}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2, **params}}}


ZENFLOW = {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 0}
TRAINED: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 1, accumulation": {**zero(1), "gradient_accumulation_steps": 2},
    "stage 2, autocast": {**zero(2), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "stage 3": zero(3, **ALL_GATHERED),
    "stage 1, bf16": {**zero(1), **BF16},
    "stage 2, fp16": {**zero(2), **FP16},
    "stage 3, bf16": {**zero(3, **ALL_GATHERED), **BF16},
    "offload, stage 2": zero(2, offload_optimizer=HOST),
    "offload, stage 3": zero(3, offload_optimizer=PINNED, offload_param=PINNED, **ALL_GATHERED),
    "offload in part": zero(3, offload_optimizer={**HOST, "ratio": 0.3}),
    "ZenFlow": zero(2, offload_optimizer=HOST, zenflow=ZENFLOW),
    "SuperOffload": {**zero(3, offload_optimizer={**HOST, "super_offload": True}), **BF16},
    "ZeRO++": zero(3, zero_quantized_weights=True, zero_quantized_gradients=True, **ALL_GATHERED),
    "1-bit Adam": optimizer("OneBitAdam", freeze_step=1),
    "Lamb": optimizer("Lamb"),
    "Lion": {**optimizer("Lion"), **zero(1)},
    "Adagrad": {**optimizer("Adagrad"), **zero(2)},
    "Muon": {**optimizer("Muon"), **zero(1)},
    "timed": {
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 2},
        "comms_logger": {"enabled": True},
        **zero(2),
    },
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.0), nn.LayerNorm(32), nn.Linear(32, WIDTH)
    )


def batches(count: int, rank: int | None = None) -> Iterator[Tensor]:
    """Those of this rank, unless one is given."""
    generator = torch.Generator().manual_seed(5 + (deepspeed.comm.get_rank() if rank is None else rank))
    for _ in range(count):
        yield torch.randn(BATCH, WIDTH, generator=generator)


def make_engine(model: nn.Module, config: dict[str, Any]) -> Any:
    whole = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        **optimizer("AdamW"),
        **config,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=whole)
    assert engine.device.type == get_accelerator().device_name()
    return engine


def train(engine: Any, steps: int = STEPS, rank: int | None = None) -> list[float]:
    losses, dtype = [], engine.get_data_types()[0]
    for batch in batches(steps, rank):
        loss = engine(batch.to(engine.device, dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(config: dict[str, Any]) -> list[float]:
    """Losses, before and after all has been saved and loaded."""
    engine = make_engine(make_model(), config)
    losses = train(engine)
    folder = [tempfile.mkdtemp()]
    if deepspeed.comm.get_world_size() > 1:
        torch.distributed.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0])
    engine.load_checkpoint(folder[0])
    losses += train(engine, 1)
    engine.destroy()
    return losses


def mixture() -> list[float]:
    from deepspeed.parallel.expert.layer import MoE

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            expert = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
            ranks = deepspeed.comm.get_world_size()
            self.before, self.moe = nn.Linear(WIDTH, WIDTH), MoE(WIDTH, expert, 4, ep_size=ranks, k=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(self.before(x))[0]

    torch.manual_seed(0)
    return train(make_engine(Mixture(), zero(2)))


def pipeline() -> list[float]:
    from deepspeed.parallel.pipeline.module import LayerSpec, PipelineModule

    torch.manual_seed(0)
    layers = [LayerSpec(nn.Linear, WIDTH, 32), nn.ReLU(), LayerSpec(nn.Linear, 32, WIDTH)]
    model = PipelineModule(layers, num_stages=deepspeed.comm.get_world_size(), loss_fn=nn.MSELoss())
    engine = make_engine(model, {"gradient_accumulation_steps": 2})
    data = ((batch, batch) for batch in batches(100))
    return [engine.train_batch(data).item() for _ in range(STEPS)] + [engine.eval_batch(data).item()]


def tensor_parallel() -> list[float]:
    specs = [
        {"patterns": [r"0\.weight$"], "partition_type": "column"},
        {"patterns": [r"2\.weight$"], "partition_type": "row"},
    ]
    section = {"autotp_size": deepspeed.comm.get_world_size(), "partition_config": {"layer_specs": specs}}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    return train(make_engine(model, {"tensor_parallel": section, **zero(1)}), rank=0)


def states() -> list[float]:
    """Reading and writing, gathering, moving to the host and back."""
    from deepspeed import utils

    config = {**zero(3, **ALL_GATHERED), **optimizer("AdamW")}
    with deepspeed.zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, **config}):
        model = make_model()
    first: Any = model[0].weight  # type: ignore[index]
    with deepspeed.zero.GatheredParameters([first], modifier_rank=0):
        first.data.fill_(0.1)
    engine = make_engine(model, config)
    losses = train(engine)
    found = utils.safe_get_full_optimizer_state(first, "exp_avg")
    utils.safe_set_full_fp32_param(first, torch.full_like(found, 0.2))
    engine.offload_states()
    engine.reload_states()
    return [*losses, found.sum().item(), *train(engine, 1)]


def checkpointed() -> list[float]:
    from deepspeed.transforms.recompute import checkpointing

    found = []
    for settings in ({}, {"partition_activations": True}, {"checkpoint_in_cpu": True}):
        checkpointing.configure(None, **settings)
        torch.manual_seed(0)
        layer = nn.Linear(8, 8).to(get_accelerator().current_device_name())
        x = torch.ones(2, 8, device=layer.weight.device, requires_grad=True)
        checkpointing.checkpoint(lambda t, layer=layer: layer(t).relu(), layer(x)).sum().backward()
        assert x.grad is not None
        found.append(x.grad.sum().item())
        checkpointing.reset()
    return found


def kernels() -> list[float]:
    from deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseSelfAttention
    from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    device = get_accelerator().current_device_name()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16).to(device).requires_grad_() for _ in range(3))
    attended = SparseSelfAttention(FixedSparsityConfig(num_heads=2), max_seq_length=64).to(device)(q, k, v)
    attended.square().sum().backward()
    config = DeepSpeedTransformerConfig(
        batch_size=2, hidden_size=32, intermediate_size=64, heads=4, attn_dropout_ratio=0.0,
        hidden_dropout_ratio=0.0, num_hidden_layers=1, initializer_range=0.02, pre_layer_norm=True, training=True,
    )  # fmt: skip
    x = torch.randn(2, 8, 32).to(device).requires_grad_()
    found = DeepSpeedTransformerLayer(config).to(device)(x, torch.zeros(2, 1, 1, 8, device=device))
    made = found[0] if isinstance(found, tuple) else found
    made.square().sum().backward()
    assert q.grad is not None and x.grad is not None
    return [attended.sum().item(), q.grad.sum().item(), made.sum().item(), x.grad.sum().item()]


def host_tensors() -> list[float]:
    """Collectives on tensors of the host, for which NCCL has no backend."""
    from deepspeed.comm.collectives import communicator

    wire = communicator(torch.distributed.group.WORLD)
    ranks, rank = wire.size, wire.rank
    own = torch.arange(4.0 * ranks) + rank
    found = [own.clone() for _ in range(4)]
    wire.all_reduce(found[0], scale=0.5).wait()
    wire.all_reduce_max(found[1]).wait()
    wire.broadcast(found[2], 0).wait()
    wire.reduce(found[3], 0).wait()
    whole = torch.zeros(4 * ranks * ranks, dtype=torch.bfloat16)
    whole[4 * ranks * rank : 4 * ranks * (rank + 1)] = own.bfloat16()
    wire.all_gather(whole, whole[4 * ranks * rank : 4 * ranks * (rank + 1)]).wait()
    part, exchanged = torch.empty(4), torch.empty_like(own)
    wire.reduce_scatter(part, own).wait()
    wire.all_to_all(exchanged, own, [4] * ranks, [4] * ranks).wait()
    wire.barrier().wait()
    kept = found if rank == 0 else found[:3]
    assert all(each.is_cpu for each in (*kept, whole, part, exchanged))
    return torch.cat([each.float().flatten() for each in (*kept, whole, part, exchanged)]).tolist()


def quantized() -> list[float]:
    """A quantized base with LoRA on it; errors of the formats themselves."""
    from deepspeed.transforms.lora import LoRAConfig, OptimizedLinear, QuantizationConfig

    device, found = get_accelerator().current_device_name(), []
    for bits in (8, 6):
        torch.manual_seed(0)
        layer = OptimizedLinear(
            64, 64, lora_config=LoRAConfig(4, 8), quantization_config=QuantizationConfig(bits)
        )
        layer = layer.to(device)
        made = layer(torch.ones(2, 64, device=device, dtype=layer.lora_weight_1.weight.dtype))
        made.float().sum().backward()
        found.append(made.float().sum().item())
    return found


SPECIAL: dict[str, Callable[[], list[float]]] = {
    "mixture of experts": mixture,
    "pipeline": pipeline,
    "tensor parallelism": tensor_parallel,
    "states": states,
    "checkpointing": checkpointed,
    "kernels": kernels,
    "quantized": quantized,
    "host tensors": host_tensors,
}
BY_RANKS = ["stage 0", "stage 2, fp16", "stage 3, bf16", "offload, stage 3", "ZeRO++", "1-bit Adam", "timed"]
SPECIAL_BY_RANKS = ["mixture of experts", "pipeline", "tensor parallelism", "states", "host tensors"]


def main(names: list[str]) -> None:
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed()
    for name in names:
        numbers = SPECIAL[name]() if name in SPECIAL else trained(TRAINED[name])
        sys.stdout.write(f"{MARK}{json.dumps([name, numbers])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[2:])

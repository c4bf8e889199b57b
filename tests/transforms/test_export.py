"""A transformed model trains like the same model in plain PyTorch, and what is exported fits the original one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.checkpoint.consolidate import consolidate
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.pool import distributed
from tests.transforms.users import SGD, Adapters, Fusion, make_model, start, tokens, train

USERS = {
    "adapters": (Adapters(),),
    "fusion": (Fusion(),),
    "adapters on what is fused": (Adapters("both", after=("fusion",)), Fusion()),
}


def fits_the_original(weights: dict[str, Tensor], expected: float, atol: float = 1e-6) -> None:
    model = make_model()
    model.load_state_dict(weights, strict=True)
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    with torch.no_grad():
        assert model(tokens(9)).item() == pytest.approx(expected, abs=atol)


def in_eval(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = engine(tokens(9)).item()
    engine.train()
    return loss


@pytest.mark.parametrize("stage, zero_init", [(0, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize("user", USERS)
@distributed(world_size=2)
def test_exports_fit_the_original(user: str, stage: int, zero_init: bool, tmp_path: Path) -> None:
    engine = start(stage, *USERS[user], zero_init=zero_init)
    train(engine, dist.get_rank(), 2 + dist.get_rank())
    expected = in_eval(engine)
    names = set(engine.module.state_dict())
    assert names != set(make_model().state_dict()) and set(engine.module_state_dict()) == names
    engine.save_16bit_model(str(tmp_path), "model.bin")
    in_memory = engine._consolidated_16bit_state_dict()
    engine.save_checkpoint(str(tmp_path), tag="now")
    if dist.get_rank() == 0:
        fits_the_original(torch.load(tmp_path / "model.bin", weights_only=True), expected)
        fits_the_original(in_memory, expected)
        fits_the_original(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "now"), expected)
        assert list(consolidate(tmp_path / "now").tensors) == [
            name for name in make_model().state_dict() if name != "head.weight"
        ]
    again = start(stage, *USERS[user], zero_init=zero_init)  # checkpoints keep the names of what was trained
    assert again.load_checkpoint(str(tmp_path), "now")[0] is not None
    assert train(again, 5) == train(engine, 5)
    engine.destroy()
    again.destroy()


@pytest.mark.parametrize("user", USERS)
@distributed(world_size=2)
def test_training_is_that_of_plain_pytorch(user: str) -> None:
    """The transforms run in the order that they ask for, on one process and without an engine."""
    engine = start(2, *USERS[user], **SGD)
    got = train(engine, dist.get_rank(), 2 + dist.get_rank(), 9)
    plain = make_model()
    for transform in sorted(USERS[user], key=lambda each: each.name):  # fusion before lora
        transform.apply(plain, Context())  # type: ignore[arg-type]
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    expected = []
    for first in (0, 2):
        losses = [plain(tokens(first + rank)) for rank in range(2)]
        expected.append(losses[dist.get_rank()].item())
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected.append(plain(tokens(9)).item())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class Context:
    """Stands for the engine's where there is none."""

    def whole(self, *tensors: Tensor) -> Any:
        return torch.no_grad()

    def replace_param(self, *params: Any) -> None: ...

    original = report = drop = replace_param


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_only_what_is_trained(stage: int, tmp_path: Path) -> None:
    """Without the frozen base nothing can be merged: the adapters keep their own names."""
    engine = start(stage, Adapters())
    engine.save_16bit_model(str(tmp_path), "adapters.bin", exclude_frozen_parameters=True)
    engine.save_checkpoint(str(tmp_path), tag="now")
    if dist.get_rank() == 0:
        adapters = {f"blocks.{i}.query.{part}" for i in (0, 1) for part in ("up", "down")}
        for weights in (
            torch.load(tmp_path / "adapters.bin", weights_only=True),
            get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "now", exclude_frozen_parameters=True),
        ):
            assert set(weights) == adapters | {"shift"}
    engine.destroy()


@distributed(world_size=2)
def test_sixteen_bits(tmp_path: Path) -> None:
    """Merged once in fp32; the dtype is that of the parts."""
    engine = start(3, Adapters(), bf16={"enabled": True})
    train(engine, dist.get_rank())
    engine.save_16bit_model(str(tmp_path), "model.safetensors")
    engine.save_checkpoint(str(tmp_path), tag="now")
    expected = in_eval(engine)
    if dist.get_rank() == 0:
        from safetensors.torch import load_file

        low = load_file(tmp_path / "model.safetensors")
        masters = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "now")
        merged = "blocks.0.query.weight"
        assert (low[merged].dtype, masters[merged].dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(low[merged].float(), masters[merged], rtol=2**-7, atol=2**-7)
        fits_the_original(
            {name: value.float() for name, value in masters.items()} | tied(masters), expected, 3e-2
        )
    engine.destroy()


def tied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    weight = weights["embed.weight"].float()
    return {"embed.weight": weight, "head.weight": weight}

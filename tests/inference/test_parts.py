"""``save_mp_checkpoint_path``: one weight file per rank, which loads on any other number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference.quantized.selection import quantize_parts
from deepspeed.inference.split.rank_files import DESCRIPTION, save_parts, whole_tensors
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from tests.pool import distributed

INPUTS = torch.linspace(-1, 1, 32).view(2, 16)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("shift", torch.full((16,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs + self.down(self.up(inputs).relu())) + self.shift


def from_file(checkpoint: Any, **more: Any) -> Tensor:
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        module = Halves()
    engine = deepspeed.init_inference(module, dtype="fp32", checkpoint=checkpoint, **more)
    with torch.no_grad():
        return engine(INPUTS)


def split(module: Halves) -> Halves:
    """Rows of the first layer and columns of the second on each rank, as Megatron cuts them."""
    everyone = torch.distributed.group.WORLD
    module.up, module.down = LinearLayer(module.up, everyone), LinearAllreduce(module.down, everyone)
    return module


@distributed(world_size=2)
def test_two_ranks_write_and_any_number_reads(tmp_path: Path) -> None:
    whole, folder = Halves().eval(), tmp_path / "parts"
    with torch.no_grad():
        wanted = whole(INPUTS)
    save_parts(split(Halves()), folder, torch.float32)
    described = json.loads((folder / DESCRIPTION).read_text())
    assert described["type"] == "ds_model" and described["tp_size"] == 2 and described["dtype"] == "float32"
    assert len(described["checkpoints"]["tp"]) == 2
    found = dict(whole_tensors([*folder.glob("*.safetensors")]))
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    for given in (str(folder), str(folder / DESCRIPTION), described):
        torch.testing.assert_close(from_file(given), wanted)


@distributed(world_size=2)
@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.02), (4, 0.2)])
def test_parts_become_integers(bits: int, allowed: float) -> None:
    module = split(Halves()).eval()
    with torch.no_grad():
        wanted = module(INPUTS)
        assert (
            quantize_parts(module, bits, 1, torch.float32)
            == 2
            == quantize_parts(split(Halves()), bits, 1, torch.float32)
        )
        assert quantize_parts(module, bits, 1, torch.float32) == 0
        assert (module(INPUTS) - wanted).norm() < allowed * wanted.norm()
    assert "in_features=16, out_features=16, bias=True, ranks=2" in repr(module.up)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halves() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](inputs))


@distributed(world_size=2)
@pytest.mark.parametrize(
    "policy",
    [
        {"injection_policy": {Halves: ("down",)}},
        {"injection_policy": {Halves: "down"}},
        {"injection_policy_tuple": ("down",)},
    ],
)
def test_a_model_that_cannot_be_followed_is_split_as_one_says(policy: dict[str, Any], tmp_path: Path) -> None:
    module = Stack().eval()
    with torch.no_grad():
        wanted = module(INPUTS)
        engine = deepspeed.init_inference(
            module, dtype="fp32", mp_size=2, save_mp_checkpoint_path=str(tmp_path), **policy
        )
        assert module.layers[0].up.weight.shape == module.layers[1].down.weight.T.shape == (16, 16)
        torch.testing.assert_close(engine(INPUTS), wanted)
        again = deepspeed.init_inference(Stack().to("meta"), dtype="fp32", checkpoint=str(tmp_path))
        torch.testing.assert_close(again(INPUTS), wanted)
    with pytest.raises(DeepSpeedConfigError, match="cannot be split"):
        deepspeed.init_inference(Stack(), dtype="fp32", mp_size=2)


@distributed(world_size=2)
def test_ranks_that_share_nothing_write_once(tmp_path: Path) -> None:
    save_parts(Halves(), tmp_path, torch.float32)
    described = json.loads((tmp_path / DESCRIPTION).read_text())
    assert described["checkpoints"] == {"non_tp": ["non-tp.safetensors"], "tp": []}
    assert sorted(path.name for path in tmp_path.iterdir()) == [DESCRIPTION, "non-tp.safetensors"]


def test_a_save_that_fails_leaves_no_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would describe files of two saves."""

    def full(*_: Any) -> None:
        raise OSError("no space left")

    save_parts(Halves(), tmp_path, torch.float32)
    monkeypatch.setattr("deepspeed.inference.split.rank_files._write", full)
    with pytest.raises(OSError, match="no space"):
        save_parts(Halves(), tmp_path, torch.float32)
    assert not (tmp_path / DESCRIPTION).exists()


def test_a_folder_may_be_moved_and_what_is_missing_is_named(tmp_path: Path) -> None:
    module = Halves().eval()
    deepspeed.init_inference(module, dtype="fp32", save_mp_checkpoint_path=str(tmp_path / "first"))
    shutil.move(tmp_path / "first", tmp_path / "second")
    torch.testing.assert_close(from_file(str(tmp_path / "second")), module(INPUTS).detach())
    from safetensors.torch import save_file

    save_file({"up.weight": torch.zeros(1)}, tmp_path / "strange.safetensors")
    with pytest.raises(DeepSpeedConfigError, match="does not say which parts"):
        list(whole_tensors([tmp_path / "strange.safetensors"]))
    described = json.dumps({"up.weight": [[4, 2], [[[0, 2], [0, 2]]]]})
    save_file({"up.weight": torch.zeros(2, 2)}, tmp_path / "half.safetensors", metadata={"parts": described})
    with pytest.raises(DeepSpeedConfigError, match="a part of up.weight is in none"):
        list(whole_tensors([tmp_path / "half.safetensors"]))


def test_megatrons_files_are_joined(tmp_path: Path) -> None:
    """Rows of one layer and columns of the other, by Megatron's names."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Module()
            self.attention.query_key_value, self.attention.dense = nn.Linear(4, 12), nn.Linear(4, 4)
            self.mlp = nn.Module()
            self.mlp.dense_h_to_4h, self.mlp.dense_4h_to_h = nn.Linear(4, 8), nn.Linear(8, 4)

    whole = Layer()
    for rank in range(2):
        state = {}
        for name, value in whole.state_dict().items():
            rows = "query_key_value" in name or "h_to_4h" in name
            columns = name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))
            state[name] = value.chunk(2, 0)[rank] if rows else value.chunk(2, 1)[rank] if columns else value
        torch.save({"module": state, "mp_world_size": 2, "checkpoint_version": 2.0}, tmp_path / f"{rank}.pt")
    described = {"type": "Megatron", "checkpoints": ["0.pt", "1.pt"], "version": 2.0}
    (tmp_path / "megatron.json").write_text(json.dumps(described))
    engine = deepspeed.init_inference(
        Layer().to("meta"), dtype="fp32", checkpoint=str(tmp_path / "megatron.json")
    )
    for name, value in whole.state_dict().items():
        assert torch.equal(engine.module.state_dict()[name], value), name
    with pytest.raises(DeepSpeedConfigError, match="type 'Megatron'"):
        deepspeed.init_inference(
            Layer().to("meta"),
            dtype="fp32",
            checkpoint={**described, "version": 7.0, "base_dir": str(tmp_path)},
        )

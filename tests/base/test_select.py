from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import deepspeed
from deepspeed.base.accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    select,
    set_accelerator,
)
from deepspeed.base.accelerator.cpu_accelerator import CPU_Accelerator

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def not_chosen(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(select, "ds_accelerator", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return monkeypatch


def test_one_object_that_can_be_replaced(not_chosen: pytest.MonkeyPatch) -> None:
    first = get_accelerator()
    assert get_accelerator() is first
    other = CPU_Accelerator()
    set_accelerator(other)
    assert get_accelerator() is other and is_current_accelerator_supported()


@pytest.mark.parametrize(
    ("value", "name"), [("cpu", "cpu"), ("CPU ", "cpu"), ("cuda", "cuda"), ("xpu", "xpu")]
)
def test_the_environment_decides(not_chosen: pytest.MonkeyPatch, value: str, name: str) -> None:
    not_chosen.setenv("DS_ACCELERATOR", value)
    assert get_accelerator().device_name() == name


@pytest.mark.parametrize(("value", "said"), [("foo", "use one of cuda, cpu"), ("npu", "no torch.npu")])
def test_what_cannot_be_used_is_refused(not_chosen: pytest.MonkeyPatch, value: str, said: str) -> None:
    not_chosen.setenv("DS_ACCELERATOR", value)
    with pytest.raises(ValueError, match=f"DS_ACCELERATOR={value}.*{said}"):
        get_accelerator()


def test_looking_for_devices_makes_no_context() -> None:
    code = (
        "import os, torch\n"
        "from deepspeed.base.accelerator import get_accelerator\n"
        "name = get_accelerator().device_name()\n"
        "print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(),"
        " os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'], (name == 'cuda') == torch.cuda.is_available())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.split() == ["False", "False", "1", "True"], done.stderr


class Devices(CPU_Accelerator):
    """``count`` devices, of which the first is the current one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.current = count, 0

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.current

    def set_device(self, device_index: int) -> None:
        self.current = device_index


@pytest.mark.parametrize(("count", "rank", "index"), [(4, 2, 2), (1, 2, 0), (1, 0, 0)])
def test_a_rank_takes_its_device(not_chosen: pytest.MonkeyPatch, count: int, rank: int, index: int) -> None:
    devices = Devices(count)
    not_chosen.setattr(select, "ds_accelerator", devices)
    assert select.take_device_of_rank(rank) == index == devices.current


def test_more_ranks_than_devices_are_refused(not_chosen: pytest.MonkeyPatch) -> None:
    not_chosen.setattr(select, "ds_accelerator", Devices(2))
    with pytest.raises(
        ValueError,
        match=r"LOCAL_RANK=2, but only 2 devices are visible to this process.*CUDA_VISIBLE_DEVICES",
    ):
        select.take_device_of_rank(2)


@pytest.mark.parametrize(("backend", "chosen", "taken"), [("nccl", 0, 1), ("nccl", 3, 3), ("gloo", 0, 0)])
def test_before_initialize_too_unless_the_script_has_chosen(
    not_chosen: pytest.MonkeyPatch, backend: str, chosen: int, taken: int
) -> None:
    devices = Devices(4)
    devices.current = chosen
    not_chosen.setattr(select, "ds_accelerator", devices)
    not_chosen.setenv("LOCAL_RANK", "1")
    not_chosen.setattr(dist, "is_initialized", lambda: True)
    not_chosen.setattr(dist, "get_backend", lambda: backend)
    deepspeed.init_distributed()
    assert devices.current == taken

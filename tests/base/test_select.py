from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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

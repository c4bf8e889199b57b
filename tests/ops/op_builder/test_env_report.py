from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed.base.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.inference import kernel_speed
from deepspeed.observe import op_speed as speed
from deepspeed.ops import native
from deepspeed.ops.op_builder import ALL_OPS
from deepspeed.tools import env_report

SMALL = {"COLUMNS": 128, "OUTPUTS": 256, "CONTEXT": 64, "VOCABULARY": 500, "BEYOND_CACHES": 1 << 20}
INTEGERS = {"int8": 8, "int4": 4, "bf16": 8}  # kind of weights -> bits


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    options = env_report.parse_arguments(list(arguments))
    env_report.main(**vars(options))
    return capsys.readouterr().out


def test_every_op_has_a_line_with_status_and_path(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report(capsys).splitlines()
    for builder in (make() for make in ALL_OPS.values()):
        (line,) = [line for line in lines if line.startswith(f"{builder.name} ")]
        if builder.is_compatible():
            assert "[OKAY]" in line and line.endswith(f" {builder.path()}")
        else:
            assert "[NO]" in line and builder.OP.instead in line


@pytest.mark.parametrize("with_library", [True, False])
def test_bench_times_every_op_on_its_path(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    with_library: bool,
) -> None:
    for name, value in (("NUMEL", 1 << 16), ("FILE_BYTES", 1 << 20), ("SECONDS", 0.0)):
        monkeypatch.setattr(speed, name, value)
    for name, value in {**SMALL, "SECONDS": 0.0}.items():
        monkeypatch.setattr(kernel_speed, name, value)
    if not with_library:
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(native, "isa", lambda: None)
        monkeypatch.setattr("deepspeed.ops.paged_attention.library", lambda: None)
    lines = report(capsys, "--bench", "--bench_dir", str(tmp_path), "--hide_operator_status").splitlines()
    names = [builder().name for builder in ALL_OPS.values()]
    for name in (*speed.OPTIMIZERS, "async_io", "utils", "deepspeed_shm_comm"):
        (start,) = [i for i, line in enumerate(lines) if line.startswith(f"{name} ")]
        is_timed = re.search(r" [0-9.]+ GB/s \(", lines[start + 1])
        assert bool(is_timed) == ALL_OPS[name]().is_compatible()
    start = lines.index(f"kernels that belong to no op, {native.isa() or 'torch'}")
    assert [line.split()[0] for line in lines[start + 1 : start + 5]] == [
        *("sgd", "sum_of_squares", "scale_copy", "reduce_chunks")
    ]
    check_kernels_of_inference(lines, with_library and native.library() is not None)
    # an op that cannot be used has no speed
    after_gds = lines[[i for i, line in enumerate(lines) if line.startswith("gds ")][0] + 1]
    assert after_gds.split()[0] in names
    assert not list(tmp_path.iterdir())


def check_kernels_of_inference(lines: list[str], native_kernels: bool) -> None:
    start = next(i for i, line in enumerate(lines) if line.startswith("kernels of inference on "))
    assert re.search(r"memory stream [0-9.]+ GB/s$", lines[start])
    rows = {line.split()[0]: line for line in lines[start + 1 :] if line.startswith("  ")}
    products = [f"product_{kind}_{rows}" for rows in (1, 16) for kind in ("fp32", "bf16", "int8", "int4")]
    pointwise = ["norm_residual", "rotary_cache_write", "gated_silu"]
    by_kernel = [*products, *pointwise, "paged_attention_decode", "sampling_greedy"]
    by_torch = ["paged_attention_prompt", "moe_grouped_product", "sampling_top_k_top_p"]
    assert sorted(rows) == sorted([*by_kernel, *by_torch])
    for name in by_kernel if native_kernels else []:
        assert re.search(r"  native \S+ +[0-9.]+ ms.*, [0-9.]+ x PyTorch$", rows[name])
    for name in by_torch if native_kernels else rows:
        assert "  pytorch " in rows[name] and "x PyTorch" not in rows[name]
    for name in ("product_bf16_1", "paged_attention_decode", "moe_grouped_product"):
        assert "% of the memory stream" in rows[name]


def test_a_busy_machine_is_told_beside_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(env_report.available_cores())
    for load, hints in ((float(cores), 0), (cores + 2.5, 1)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert len(list(env_report._load_hints())) == hints


def test_kernels_that_are_timed_compute_what_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(kernel_speed, name, value)
    torch.manual_seed(0)
    compared = []
    for case in kernel_speed.cases(kernel_speed.Machine()):
        if case.kernel is None:
            continue
        bits = next((bits for kind, bits in INTEGERS.items() if kind in case.name), None)
        with torch.inference_mode():
            ours, plain = (torch.as_tensor(call()).double() for call in (case.kernel, case.plain))
        ours = ours.reshape(plain.shape)
        wrong = ((ours - plain).norm() / plain.norm()).item()
        # integers are compared with the weights that they are rounded from: half a step of a uniform distribution
        assert wrong < (1e-5 if bits is None else 2.0 ** (1 - bits)), case.name
        compared.append(case.name)
    assert bool(compared) == (kernel_speed.Machine().path != "pytorch")


def test_speeds_count_what_has_to_move() -> None:
    assert str(speed.Speed("x", 30_000_000, 0.001, 1_000_000)) == "1000 M elements/s, 30.0 GB/s (x)"
    assert str(speed.Speed("write", 1 << 30, 0.5)) == "2.1 GB/s (write)"


def test_build_variables_have_no_effect_and_the_report_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("DS_BUILD_")]:
        monkeypatch.delenv(name)
    before = report(capsys)
    assert "DS_BUILD_* variables are accepted but have no effect\n" in before
    monkeypatch.setenv("DS_BUILD_OPS", "1")
    monkeypatch.setenv("DS_BUILD_CPU_ADAM", "0")
    after = report(capsys)
    assert "no effect (set here: DS_BUILD_CPU_ADAM=0, DS_BUILD_OPS=1)\n" in after
    table = [line for line in after.splitlines() if "[OKAY]" in line or "[NO]" in line]
    assert table == [line for line in before.splitlines() if "[OKAY]" in line or "[NO]" in line]


def test_versions_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    out = report(capsys, "--hide_operator_status")
    assert "cpu_adam" not in out
    for text in (deepspeed.__version__, torch.__version__, platform.python_version(), sys.executable, "gloo"):
        assert text in out
    for title in ("cores", "memory", "accelerator", "communication backends", "shared memory", "data types"):
        assert f"\n{title}" in out
    assert "\033" not in out  # colours are for terminals


def test_hints_name_the_remedy_and_can_be_hidden(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "isa", lambda: None)
    monkeypatch.setattr(env_report, "get_shm_size", lambda: 64 * 1024**2)
    out = report(capsys)
    assert out.count("[WARNING] The native library was not built") == 1 and "apt install g++" in out
    assert "[WARNING] /dev/shm has only 64.00 MB" in out and "--shm-size" in out
    assert "cpu_adam ................. [OKAY]    pytorch" in out
    assert "[WARNING]" not in report(capsys, "--hide_errors_and_warnings")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("deepspeed.tools.env_report", "deepspeed.ops.op_builder.builder"):
        monkeypatch.setattr(f"{module}.get_accelerator", CUDA_Accelerator)
    out = report(capsys)
    assert "[WARNING] No cuda device was found" in out and "nccl" in out


def test_an_instruction_set_that_was_lowered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_NATIVE_ISA", "avx2")
    monkeypatch.setattr(native, "isa", lambda: "avx2")
    assert "[WARNING] DS_NATIVE_ISA=avx2: native kernels use avx2" in report(capsys)


def test_sizes() -> None:
    assert [env_report.human_readable_size(size) for size in (0, 1023, 1536, 5 * 1024**4)] == [
        "0.00 B",
        "1023.00 B",
        "1.50 KB",
        "5.00 TB",
    ]
    size = env_report.get_shm_size()
    assert size is None or size > 0


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ds_report", "--help"])
    with pytest.raises(SystemExit) as end:
        env_report.cli_main()
    out = capsys.readouterr().out
    assert end.value.code == 0 and "--hide_operator_status" in out and "--hide_errors_and_warnings" in out
    monkeypatch.setattr(sys, "argv", ["ds_report", "--hide_operator_status"])
    env_report.cli_main()
    assert "torch version" in capsys.readouterr().out

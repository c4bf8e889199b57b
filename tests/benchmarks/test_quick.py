"""Every benchmark's short form runs and prints its table; the helpers do their arithmetic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = {
    "adam.py": ["10M parameters, 1 thread, with bf16 copy-out", "stream"],
    "autotuning.py": ["autotuner chose", "the grid"],
    "checkpoint.py": ["ours, stage 2", "MB on disk"],
    "codecs.py": ["encode signs", "of the stream"],
    "comm_shared_memory.py": ["all_reduce, 2 ranks", "shared memory us"],
    "data_analysis.py": ["one metric of 200,000 samples", "sampler"],
    "compressed_loss.py": ["ZeRO-3, qwZ and qgZ", "difference, mean"],
    "compression.py": ["half of the layers, binary", "8-bit weights and activations", "matrix products"],
    "engine_cost.py": ["plain loop", "ours, stage 2"],
    "expert_products.py": ["dense, one product", "stacked weights, one call"],
    "going_on.py": ["seconds still", "with replicate_state"],
    "layer_dropping.py": ["layers dropped", "on the way"],
    "live.py": ["with monitor.live", "answers; the record has"],
    "long_sequence.py": ["x plain", "and attention in chunks"],
    "moe.py": ["ours, top-2", "dispatch and combine"],
    "pipeline.py": ["one rank, plain", "ours, zero-bubble"],
    "pipeline_bubbles.py": ["1f1b", "zero-bubble-v, 4 chunks"],
    "scale.py": ["stage 3, tiny GPT, fp32, one rank", "files opened"],
    "compiled_stage3.py": ["DDP, compiled", "ours, stage 3, compiled"],
    "quantized_base.py": ["held out fp32", "seed 0"],
    "compact_adam.py": ["bf16 masters, 8-bit moments", "held out"],
    "fp_quantizer.py": ["float32, 6 bits", "dequantize"],
    "peer_compression.py": ["OneBitAdam, nccl", "qgZ", "runs"],
    "offload_budget.py": ["peak of private memory, GiB"],
    "offload_swap.py": ["raw handle", "in the step"],
    "save_stall.py": ["one copy", "into memory that is new"],
    "offload_stalls.py": ["SuperOffload", "link bytes", "held out"],
    "sparse_attention.py": ["bigbird", "x density"],
    "start.py": ["import deepspeed after import torch", "ours, stage 2"],
    "counted_claims.py": ["1-bit LAMB, behind it", "PR-MoE-32/64"],
    "zero_memory.py": ["ds plan, GB", "paper, GB"],
    "train_step.py": ["compute alone", "ours, stage 2"],
}

# Those that take a few seconds. That of checkpoint.py is run by test_everything.py.
SHORT = {"data_analysis.py", "engine_cost.py", "expert_products.py", "moe.py"}


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.slow]) for name in SCRIPTS]
)
def test_quick_form_prints_its_table(script: str) -> None:
    printed = run(script, "--quick")
    for text in SCRIPTS[script]:
        assert text in printed


@pytest.mark.slow
def test_quick_form_on_a_disk(tmp_path: Path) -> None:
    printed = run("nvme.py", "--quick", "--folder", str(tmp_path))
    assert re.search(r"^read +ours +\d", printed, flags=re.M)


WITH_CLIENTS = {
    "flops_profile.py": ["forward + backward", "ours"],
    "inference.py": ["decoding 24 tokens", "kernels, fp32", "ours, continuous"],
    "random_ltd.py": ["forward and backward of one layer", "of full"],
    "quantized_perplexity.py": ["int8, init_inference", "int4, gptq"],
    "transformer_layer.py": ["x eager", "ours"],
    "serving.py": ["16/s, ours", "good/s", "1 clients, ours", "4 clients, with guesses"],
    "soak.py": ["structured", "after the warm-up", "nothing leaked, and every answer was right"],
    "streamed_weights.py": ["bf16", "int4", "own memory"],
    "tensor_parallel.py": ["tiny Llama, fp32, stage 0", "ours, DP 2", "ours, TP 2", "ours, SP 2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", WITH_CLIENTS)
def test_quick_form_with_a_client_prints_its_table(script: str) -> None:
    pytest.importorskip("transformers", reason="the clients extra is not installed")
    printed = run(script, "--quick")
    for text in WITH_CLIENTS[script]:
        assert text in printed


@pytest.mark.parametrize(
    "script", [*SCRIPTS, *WITH_CLIENTS, "pipeline_links.py", "slow_links.py", "gpu/train_step.py"]
)
def test_help(script: str) -> None:
    done = forked.run([str(BENCHMARKS / script), "--help"], env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--quick" in done.stdout


def in_benchmarks(code: str) -> str:
    """Return the output of ``code``, run in the folder of the scripts (they import each other by file name)."""
    done = forked.run(["-c", code], cwd=BENCHMARKS, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_runs_are_packed_into_memory_with_the_baseline_in_each() -> None:
    code = """
import json
from jobs import Contender, pack
base = Contender("base", "", {}, memory_gib=2)
rows = [Contender(str(i), "", {}, memory_gib=3) for i in range(5)]
print(json.dumps([[c.name for c in run] for run in pack(rows, [base], 10)]))
"""
    assert json.loads(in_benchmarks(code)) == [["base", "0", "1"], ["base", "2", "3"], ["base", "4"]]


def test_ratios_are_taken_within_rounds() -> None:
    code = "from jobs import ratios; print(ratios([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]).show())"
    assert in_benchmarks(code).strip() == "3.00 [2.00 .. 4.00]"


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    code = """
from jobs import Job, JobError
try:
    Job("wrong", "trainers:Trainer", {"system": "none", "model": "mlp", "precision": "fp32"}, ranks=1)
except JobError as error:
    print(error)
"""
    printed = in_benchmarks(code)
    assert "rank 0 failed in start" in printed
    assert "KeyError: 'none'" in printed


def test_no_path_of_the_machine_is_saved() -> None:
    code = """
import argparse
from report import Report
paths = {"peer": "/opt/peer/bin/python", "llama": "/opt/llama/bin/python"}
paths |= {"folder": "/mnt/disk", "rounds_file": "/mnt/rounds.json"}
told = argparse.Namespace(save=None, rounds=7, **paths)
print(Report("any", told).data["arguments"])
"""
    assert in_benchmarks(code).splitlines()[-1] == "{'rounds': 7}"
    for path in BENCHMARKS.glob("results/*.json"):
        assert re.search(r'"/\w', path.read_text()) is None, path.name

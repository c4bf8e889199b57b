"""Makes the fixtures in tests/files/upstream_checkpoints with DeepSpeed 0.19.8.

Not part of the suite. Needs a Python in which that release is installed:

    python tests/checkpoint/make_upstream_checkpoints.py PYTHON_WITH_0_19

Trains a small model at each stage and precision on 2 ranks, saves a checkpoint, and asks that release's own
``ds_to_universal`` for the fp32 weights and moments of each parameter: the oracle, kept in ``expected.pt``. Its sibling
``check_exports.py`` has that release load what we export.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16", "fp16")]
EXTRAS: dict[str, tuple[int, str, dict[str, Any]]] = {
    # its conversion names these wrongly, so the only oracle is the model file
    "stage2_round_robin": (
        2,
        "bf16",
        {"zero_optimization": {"round_robin_gradients": True, "reduce_bucket_size": 50}},
    ),
    # the separate bf16 optimizer, with other keys
    "stage1_fp32_accumulation": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
}
FIXTURES = Path(__file__).resolve().parents[1] / "files/upstream_checkpoints"


def model() -> Any:
    """Tied, frozen and buffer tensors; the sizes are odd, so that partitions are padded."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(11, 6)
            self.frozen = nn.Linear(6, 5)
            self.l1 = nn.Linear(5, 7)
            self.norm = nn.LayerNorm(7)
            self.l2 = nn.Linear(7, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.emb.weight
            self.register_buffer("count", torch.arange(3.0))
            self.frozen.requires_grad_(False)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.l2(self.norm(torch.tanh(self.l1(self.frozen(self.emb(tokens)))))))

    return Net()


def config(stage: int, precision: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
    }
    if stage:
        made["zero_optimization"] = {"stage": stage}
    if precision == "bf16":
        made["bf16"] = {"enabled": True}
    if precision == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return made


def groups(net: Any) -> list[dict[str, Any]]:
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def on_a_rank(folder: str, stage: int, precision: str, settings: dict[str, Any]) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    import deepspeed
    from deepspeed.base.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # type: ignore[method-assign] - it works, only slowly
    torch.manual_seed(0)
    net = model()
    ds_config = config(stage, precision)
    for section, entries in settings.items():
        ds_config.setdefault(section, {}).update(entries)
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=groups(net), config=ds_config)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + engine.global_rank)
        tokens = torch.randint(0, 11, (4, 5), generator=generator)
        labels = torch.randint(0, 11, (4, 5), generator=generator)
        loss = cross_entropy(engine(tokens).float().flatten(0, 1), labels.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 3, "note": "hello"})
    torch.distributed.barrier()
    os._exit(0)  # that release's threads now and then abort at exit


def deepspeed_gather(net: Any, stage: int) -> Any:
    import contextlib

    import deepspeed

    return (
        deepspeed.zero.GatheredParameters(list(net.parameters())) if stage == 3 else contextlib.nullcontext()
    )


def launch(python: str, world: int, *arguments: str, script: str = __file__) -> None:
    """Run ``script rank ARGUMENTS`` on ``world`` ranks of the other Python."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", script]
    for _ in range(3):  # that release's shared-memory transport hangs now and then
        process = subprocess.Popen(
            [*command, "rank", *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            continue
        if process.returncode:
            raise SystemExit(f"{arguments} failed:\n{output[-4000:]}")
        return
    raise SystemExit(f"{arguments} hung three times")


def universal(python: str, folder: Path) -> dict[str, Any]:
    """Whole fp32 weights and moments by that release's own conversion."""
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "universal"
        command = [
            python,
            "-m",
            "deepspeed.tools.ds_to_universal",
            "--no_strict",
            "--inject_missing_state",
        ]
        command += ["--input_folder", str(folder), "--output_folder", str(out)]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        env.pop("PYTHONPATH", None)
        done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=120)
        assert (out / "zero").is_dir(), done.stderr[-3000:]
        found: dict[str, Any] = {}
        for path in sorted((out / "zero").glob("*/*.pt")):
            value = torch.load(path, weights_only=False)
            value = value["param"] if isinstance(value, dict) else value
            found[f"{path.parent.name}/{path.stem}"] = torch.as_tensor(value)
        return found


def make(python: str) -> None:
    import torch

    cases = {f"stage{stage}_{precision}": (stage, precision, {}) for stage, precision in CASES} | EXTRAS
    for name, (stage, precision, settings) in cases.items():
        folder = FIXTURES / name
        if (folder / "latest").exists():
            continue  # remove the folder to make it again
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch(python, 2, str(folder), str(stage), precision, json.dumps(settings))
        for path in folder.glob("*.py"):
            path.unlink()
        if stage and name != "stage2_round_robin":
            found = universal(python, folder / "global_step3")
            sizes = {name: value.numel() for name, value in found.items()}  # one tensor makes a small file
            flat = torch.cat([value.float().reshape(-1) for value in found.values()])
            torch.save({"sizes": sizes, "flat": flat}, folder / "expected.pt")
        print(folder.name, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()), "bytes")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        on_a_rank(sys.argv[2], int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]))
    else:
        make(sys.argv[1])

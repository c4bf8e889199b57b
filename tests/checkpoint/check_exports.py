"""Has DeepSpeed 0.19.8 itself load what ``upstream_export`` writes, and compares its state with ours.

Not part of the suite. Needs a Python in which that release is installed:

    PYTHONPATH=. python tests/checkpoint/check_exports.py PYTHON_WITH_0_19 [CASE ...]

A case such as ``2-bf16-3`` is a stage, a precision and a number of ranks; ``round_robin`` and ``sub_groups`` are
options that change the layout. Each trains our engine on two ranks at another stage, exports, and asks that release
for: whole masters and moments of every parameter after ``load_checkpoint``, its counters, its loss scale and schedule,
one more training step, and the result of its ``zero_to_fp32``. All must equal what our engine held, bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CASES = [f"{stage}-{precision}-2" for stage in range(4) for precision in ("fp32", "bf16", "fp16")]
CASES += [f"{stage}-fp32-{world}" for stage in range(4) for world in (1, 3)]
CASES += [
    "2-bf16-2-round_robin",
    "1-fp32-2-round_robin",
    "3-fp32-2-sub_groups",
    "3-fp32-2-sub_groups_reached",
]
CASES += ["1-bf16-2-fp32_accumulation", "1-bf16-3-fp32_accumulation", "2-bf16-2-fp32_accumulation"]
OPTIONS = {
    "round_robin": {"zero_optimization": {"round_robin_gradients": True}},
    "sub_groups": {"zero_optimization": {"sub_group_size": 50}},
    "sub_groups_reached": {"zero_optimization": {"sub_group_size": 51}},
    "fp32_accumulation": {"data_types": {"grad_accum_dtype": "fp32"}},
}


def in_that_release(folder: str, stage: int, precision: str, out: str, settings: dict[str, Any]) -> None:
    """On one rank of a job of release 0.19.8: load, and write down what it holds."""
    import torch
    from make_upstream_checkpoints import config, deepspeed_gather, groups, model
    from torch.nn.functional import cross_entropy

    import deepspeed
    from deepspeed.base.accelerator import get_accelerator
    from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param, safe_get_full_optimizer_state

    get_accelerator().is_fp16_supported = lambda: True  # type: ignore[method-assign] - it works, only slowly
    torch.manual_seed(5)
    net = model()
    ds_config = config(stage, precision)
    for section, entries in settings.items():
        ds_config.setdefault(section, {}).update(entries)
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=groups(net), config=ds_config)
    path, client = engine.load_checkpoint(folder)
    assert path is not None, "nothing was loaded"
    scale = None
    if precision == "fp16":
        scale = engine.optimizer.cur_scale if stage else engine.optimizer.state_dict()["cur_scale"]
    schedule = dict(engine.lr_scheduler.state_dict())
    state: dict[str, Any] = {}
    with deepspeed_gather(net, stage):
        weights = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    if stage == 3:
        for name, param in net.named_parameters():
            if param.requires_grad:
                state[f"{name}/fp32"] = safe_get_full_fp32_param(param)
                for kind in ("exp_avg", "exp_avg_sq"):
                    state[f"{name}/{kind}"] = safe_get_full_optimizer_state(param, kind)
    elif stage:
        state = from_partitions(engine, net, stage, settings)
    else:
        state = from_whole_tensors(engine, net)
    tokens = torch.randint(0, 11, (4, 5))
    loss = cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        torch.save(
            {
                "weights": weights,
                "state": state,
                "client": client,
                "steps": engine.global_steps - 1,
                "schedule": schedule,
                "scale": scale,
                "loss": loss.item(),
            },
            out,
        )
    torch.distributed.barrier()
    os._exit(0)  # that release's threads now and then abort at exit


def from_partitions(engine: Any, net: Any, stage: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Stages 1 and 2: each group's tensors lie end to end, over all ranks."""
    import torch
    from make_upstream_checkpoints import groups

    optimizer, known = engine.optimizer, {id(p): name for name, p in net.named_parameters()}
    state: dict[str, Any] = {}
    for number, group in enumerate(groups(net)):
        masters = (
            getattr(optimizer, "single_partition_of_fp32_groups", None)
            or optimizer.fp32_groups_flat_partition
        )
        own = masters[number]
        inner = optimizer.optimizer.state[optimizer.optimizer.param_groups[number]["params"][0]]
        params = group["params"]
        if stage == 2 and "round_robin_gradients" in settings.get("zero_optimization", {}):
            world = engine.world_size
            params = [p for first in range(world) for p in params[first::world]]
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            part = own if kind == "fp32" else inner[kind]
            parts: list[Any] = [None] * engine.world_size
            torch.distributed.all_gather_object(parts, part.detach().clone())
            flat, position = torch.cat(parts), 0
            for param in params:
                state[f"{known[id(param)]}/{kind}"] = flat[position : position + param.numel()]
                position += param.numel()
    return state


def from_whole_tensors(engine: Any, net: Any) -> dict[str, Any]:
    """Stage 0: a torch optimizer over the masters."""
    from make_upstream_checkpoints import groups

    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters = [p for group in inner.param_groups for p in group["params"]]
    trained = [p for group in groups(net) for p in group["params"]]
    known = {id(p): name for name, p in net.named_parameters()}
    state: dict[str, Any] = {}
    for master, param in zip(masters, trained, strict=True):
        state[f"{known[id(param)]}/fp32"] = master.detach().clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            state[f"{known[id(param)]}/{kind}"] = inner.state[master][kind].clone()
    return state


def check(python: str, case: str) -> str:
    import torch

    from deepspeed.checkpoint.foreign.upstream_export import export_checkpoint
    from tests.checkpoint.make_upstream_checkpoints import launch
    from tests.checkpoint.models import save_as_fixtures_were
    from tests.pool import run

    number, precision, world, *options = case.split("-")
    stage = int(number)
    settings = OPTIONS[options[0]] if options else {}
    with tempfile.TemporaryDirectory() as scratch:
        own, out = Path(scratch, "own"), Path(scratch, "exported")
        options_ = {"stage": 3 - stage, "precision": precision, "settings": settings}
        made = run(save_as_fixtures_were, 2, folder=str(own), **options_)[0]
        folder = export_checkpoint(own, out, zero_stage=stage, world_size=int(world))
        loaded_file = str(Path(scratch, "loaded.pt"))
        launch(
            python,
            int(world),
            str(out),
            number,
            precision,
            loaded_file,
            json.dumps(settings),
            script=__file__,
        )
        loaded = torch.load(loaded_file)
        assert (loaded["client"]["epoch"], loaded["client"]["note"], loaded["steps"]) == (3, "hello", 3)
        assert loaded["schedule"] == made["schedule"], loaded["schedule"]
        if precision == "fp16":
            assert loaded["scale"] == made["scale"], loaded["scale"]
        for name, value in loaded["weights"].items():
            assert torch.equal(value, made["weights"][name]), f"weight {name}"
        expected = {key: value for key, value in made["state"].items() if not key.endswith("/step")}
        assert loaded["state"].keys() == expected.keys(), loaded["state"].keys() ^ expected.keys()
        for key, value in loaded["state"].items():
            assert torch.equal(value.float().view(-1), expected[key].view(-1)), key
        assert 0 < loaded["loss"] < 10, loaded["loss"]
        done = f"{len(expected)} tensors equal" + (
            _their_fp32(python, out, scratch, made["state"]) if stage else ""
        )
        return f"{case}: {folder.name} loaded; {done}"


def _their_fp32(python: str, out: Path, scratch: str, state: dict[str, Any]) -> str:
    """That release's own consolidation of the exported files."""
    import torch

    code = (
        "import sys, torch; from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get;"
        "torch.save(get(sys.argv[1]), sys.argv[2])"
    )
    file = str(Path(scratch, "fp32.pt"))
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    env.pop("PYTHONPATH", None)
    command = [python, "-c", code, str(out), file]
    done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = torch.load(file)
    assert torch.equal(whole["head.weight"], whole["emb.weight"])
    masters = {key.removesuffix("/fp32"): value for key, value in state.items() if key.endswith("/fp32")}
    for name, value in masters.items():
        assert torch.equal(whole[name].view(-1), value.view(-1)), f"zero_to_fp32: {name}"
    return f", zero_to_fp32 gives {len(masters)} of them and {len(whole)} names"


def main() -> None:
    python, *cases = sys.argv[1:]
    failed = 0
    for case in cases or CASES:
        try:
            print(check(python, case), flush=True)
        except (AssertionError, SystemExit) as error:
            failed += 1
            print(f"{case}: FAILED: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.path = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parents[2])]
        _, _, folder_, stage_, precision_, out_, settings_ = sys.argv
        in_that_release(folder_, int(stage_), precision_, out_, json.loads(settings_))
    else:
        main()

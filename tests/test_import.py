"""`import deepspeed`: what it exposes, what it costs, and that it does nothing."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed

ROOT = Path(__file__).resolve().parent.parent
# API.md area 1
DOCUMENTED = """
ops module_inject get_accelerator TORCH_DISTRIBUTED_DEFAULT_PORT DeepSpeedEngine DeepSpeedOptimizerCallable
DeepSpeedSchedulerCallable ADAM_OPTIMIZER LAMB_OPTIMIZER MUON_OPTIMIZER DeepSpeedOptimizer DeepSpeedDataLoader
DeepSpeedHybridEngine PipelineEngine InferenceEngine DeepSpeedInferenceConfig add_tuning_arguments
DeepSpeedConfig DeepSpeedConfigError checkpointing DeepSpeedTransformerLayer DeepSpeedTransformerConfig
replace_transformer_layer revert_transformer_layer set_autotp_mode log_dist OnDevice logger init_distributed
zero domino is_compile_supported PipelineModule pipe comm utils runtime inference accelerator moe version
git_hash git_branch __version__ __version_major__ __version_minor__ __version_patch__ __git_hash__
__git_branch__ dist HAS_TRITON default_inference_config set_optimizer_flags tp_model_init initialize
init_inference add_config_arguments types check_config
""".split()


def fresh(code: str) -> str:
    """Return the output of `code` in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_name_is_on_the_package(name: str) -> None:
    getattr(deepspeed, name)
    assert name in dir(deepspeed)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        deepspeed.no_such_name  # noqa: B018


def test_version_agrees_everywhere() -> None:
    assert deepspeed.__version__ == "1.0.0" == deepspeed.version
    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert parts == (1, 0, 0)
    assert f'version = "{deepspeed.__version__}"' in (ROOT / "pyproject.toml").read_text()
    try:
        assert importlib.metadata.version("deepspeed") == deepspeed.__version__
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("deepspeed is not installed, only on the path")


def test_import_alone_gives_dotted_access() -> None:
    paths = (
        "zero.config.DeepSpeedZeroConfig comm.all_reduce utils.logger ops.adam runtime.lr_schedules.WarmupLR "
        "runtime.utils.see_memory_usage runtime.config.DeepSpeedConfig checkpointing.configure moe.layer "
        "pipe.PipelineModule module_inject accelerator.get_accelerator initialize DeepSpeedEngine"
    ).split()
    assert fresh("import deepspeed\n" + "\n".join(f"deepspeed.{path}" for path in paths)) == ""


def test_import_does_nothing(tmp_path: Path) -> None:
    """No torch, no thread, no file, no warning, no process group, and one documented environment variable."""
    code = """
import json, os, sys, threading, warnings
warnings.simplefilter("error")
before = dict(os.environ)
import deepspeed
print(json.dumps({
    "torch": "torch" in sys.modules,
    "threads": threading.active_count(),
    "env": [name for name in os.environ if os.environ[name] != before.get(name)],
    "ours": sorted(name for name in sys.modules if name.startswith("deepspeed")),
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["torch"] is False
    assert found["threads"] == 1
    assert found["env"] == ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    assert all(name.split(".")[1:2] in ([], ["compat"], ["version"]) for name in found["ours"]), found["ours"]
    assert list(tmp_path.iterdir()) == []


def test_loading_the_training_core_starts_nothing() -> None:
    """The names that training touches first, without warnings, CUDA, process groups or heavy extras."""
    code = """
import sys, warnings
warnings.simplefilter("error", FutureWarning)
import torch
of_torch = {"triton", "cpuinfo"} & set(sys.modules)
import deepspeed
deepspeed.initialize, deepspeed.DeepSpeedEngine, deepspeed.zero, deepspeed.comm, deepspeed.init_distributed
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
heavy = {"triton", "transformers", "tokenizers", "matplotlib", "tensorboard", "wandb", "cpuinfo", "hjson"}
print(sorted(heavy & set(sys.modules) - of_torch))
"""
    assert fresh(code) == "[]"


def test_import_beyond_torch_is_quick() -> None:
    """Counted, not timed: `import deepspeed` adds a handful of small modules to `import torch`."""
    code = """
import sys, torch
known = set(sys.modules)
import deepspeed
print(len(set(sys.modules) - known))
"""
    assert int(fresh(code)) < 20


def test_initialize_has_the_documented_signature() -> None:
    parameters = inspect.signature(deepspeed.initialize).parameters
    assert " ".join(parameters) == (
        "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
        "dist_init_required collate_fn config mesh_param config_params"
    )
    assert parameters["distributed_port"].default == deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT == 29500
    assert all(p.default is None for name, p in parameters.items() if name != "distributed_port")


def test_dist_is_none_until_a_process_group_exists() -> None:
    assert deepspeed.dist is None


def test_config_arguments() -> None:
    parser = argparse.ArgumentParser()
    assert deepspeed.add_config_arguments(parser) is parser
    assert vars(parser.parse_args([])) == {
        "deepspeed": False,
        "deepspeed_config": None,
        "deepscale": False,
        "deepscale_config": None,
    }
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert args.deepspeed is True and args.deepspeed_config == "ds.json"


def test_console_scripts_exist() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project.scripts]")[1].split("\n[")[0]
    scripts = dict(line.replace('"', "").split(" = ") for line in section.strip().splitlines())
    assert {"deepspeed", "ds", "ds_report", "dsr", "ds_check"} <= set(scripts)
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


FIRST_STEPS = """
import gc, sys, torch
import deepspeed
slow = {"torch._dynamo", "torch._inductor", "torch.onnx", "triton", "transformers", "hjson", "sympy"}
for stage in (0, 2, 3):
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    print(stage, sorted(slow & set(sys.modules)), gc.isenabled())
"""


def test_a_first_step_does_not_import_the_compiler() -> None:
    """Half a second that only those who compile should pay (torch's own optimizers import it when made)."""
    said = [line for line in fresh(FIRST_STEPS).splitlines() if not line.startswith("[20")]  # without the log
    assert said == [f"{stage} [] True" for stage in (0, 2, 3)]


def test_modules_are_reached_by_attributes_after_only_the_import_of_the_package():
    """Like upstream's own modules, which one start imports; here each is imported on demand."""
    code = """
import sys, deepspeed
for path in (
    "elasticity.config.ElasticityError", "elasticity.compute_elastic_config", "linear.Init", "nebula.config",
    "runtime.zero.utils.ZeRORuntimeException", "runtime.pipe.topology.ProcessTopology", "monitor.monitor.MonitorMaster",
    "profiling.flops_profiler.profiler.FlopsProfiler", "compression.compress.init_compression", "sequence.layer",
    "git_version_info.version", "checkpoint.constants.UNIVERSAL_CHECKPOINT_INFO", "runtime.swap_tensor.utils",
):
    found = deepspeed
    for name in path.split("."):
        found = getattr(found, name)
assert not any(hasattr(place, "nothing") for place in (deepspeed, deepspeed.elasticity, deepspeed.runtime.zero))
print("reached")
"""
    assert fresh(code) == "reached"

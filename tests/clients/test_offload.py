"""Offload through the Trainer and through Accelerate: the numbers of a run without it, saved and resumed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("accelerate", reason="the clients extra is not installed")

from transformers import TrainerCallback

from tests.clients.kit import assert_same_weights, auto_config, bf16_without_gpu, clean_clients, whole_weights
from tests.clients.test_trainer import arguments, losses, trainer
from tests.pool import distributed

Places = dict[str, str]

PLACES: list[tuple[int, Places]] = [
    (1, {"offload_optimizer": "cpu"}),
    (2, {"offload_optimizer": "cpu"}),
    (2, {"offload_optimizer": "nvme"}),
    (3, {"offload_optimizer": "cpu"}),
    (3, {"offload_optimizer": "nvme"}),
    (3, {"offload_param": "cpu"}),
    (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    (3, {"offload_optimizer": "nvme", "offload_param": "nvme"}),
]
IDS = [
    "-".join([str(stage), *(f"{key[8:]}_{value}" for key, value in places.items())])
    for stage, places in PLACES
]


def config(stage: int, places: Places, folder: Path) -> dict[str, Any]:
    made = auto_config(stage)
    for section, device in places.items():
        made["zero_optimization"][section] = {"device": device, "pin_memory": False}
        if device == "nvme":
            (folder / "swap").mkdir(exist_ok=True)
            made["zero_optimization"][section]["nvme_path"] = str(folder / "swap")
    return made


def sections(settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [value for value in settings["zero_optimization"].values() if isinstance(value, dict)]


class SwapFiles(TrainerCallback):
    """Return whether this process holds (unlinked) files below the folder open during the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = str(folder), False

    def on_step_end(self, *_: Any, **__: Any) -> None:
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                held = os.stat(descriptor).st_size if os.readlink(descriptor).startswith(self.folder) else 0
                self.seen = self.seen or held > 0


def train(folder: Path, settings: dict[str, Any], *, bf16: bool = False, resume: str | None = None) -> Any:
    with clean_clients(), bf16_without_gpu():
        args = arguments(folder, settings, bf16=bf16, save_strategy="steps", save_steps=2)
        watch = SwapFiles(folder.parent / "swap")
        run = trainer(args, callbacks=[watch])
        run.train(resume_from_checkpoint=resume)
        assert watch.seen == any(section.get("device") == "nvme" for section in sections(settings))
        evaluation = run.evaluate()["eval_loss"]
        run.save_model(str(folder / "model"))
        return losses(run), whole_weights(run.model), evaluation


@pytest.mark.parametrize(("stage", "places"), PLACES, ids=IDS)
@distributed(world_size=2, timeout=120)
def test_trainer_trains_saves_and_resumes(tmp_path: Path, stage: int, places: Places) -> None:
    """fp32: bit for bit what a run without offload does, also after a resume; the saved model is the trained one."""
    from transformers import LlamaForCausalLM

    expected, weights, _ = train(tmp_path / "plain", auto_config(stage))
    settings = config(stage, places, tmp_path)
    ours, offloaded, evaluation = train(tmp_path / "offloaded", settings)
    assert ours == expected and 0 < evaluation < 10
    assert_same_weights(offloaded, weights)
    middle = str(tmp_path / "offloaded" / "checkpoint-2")
    again, resumed, _ = train(tmp_path / "resumed", settings, resume=middle)
    assert again == ours
    assert_same_weights(resumed, weights)
    torch.distributed.barrier()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "offloaded" / "model")
    assert_same_weights({n: p.detach() for n, p in saved.named_parameters()}, weights)


@pytest.mark.parametrize("places", [PLACES[5][1], PLACES[7][1]], ids=["cpu", "nvme"])
@distributed(world_size=2, timeout=120)
def test_loaded_under_zero_init_and_trained_in_bf16(tmp_path: Path, places: Places) -> None:
    """`from_pretrained` puts the parameters where the config says, and training continues from there."""
    from transformers import AutoModelForCausalLM

    from tests.clients.kit import llama

    if torch.distributed.get_rank() == 0:
        llama().save_pretrained(tmp_path / "base")
    torch.distributed.barrier()
    with clean_clients(), bf16_without_gpu():
        args = arguments(tmp_path / "out", config(3, places, tmp_path), bf16=True)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert all(param.numel() == 0 for param in model.parameters())
        run = trainer(args, model)
        run.train()
        steps = losses(run)
        assert steps[-1] < steps[0]


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@distributed(world_size=2, timeout=120)
def test_accelerate_maps_the_optimizer(tmp_path: Path, device: str) -> None:
    """With an offloaded optimizer Accelerate makes a DeepSpeedCPUAdam of the client's AdamW."""
    from accelerate import Accelerator, DeepSpeedPlugin

    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from tests.clients.test_accelerate import prepared
    from tests.clients.test_accelerate import train as train_with

    with clean_clients():
        plugin = DeepSpeedPlugin(
            zero_stage=2, offload_optimizer_device=device, offload_optimizer_nvme_path=str(tmp_path)
        )
        launched = Accelerator(deepspeed_plugin=plugin)
        model, optimizer, data = prepared(launched)
        assert isinstance(model.optimizer.optimizer, DeepSpeedCPUAdam)
        first = train_with(launched, model, optimizer, data)
        launched.save_state(str(tmp_path / "state"))
        second = train_with(launched, model, optimizer, data)
        launched.load_state(str(tmp_path / "state"))
        assert train_with(launched, model, optimizer, data) == second and sum(second) < sum(first)

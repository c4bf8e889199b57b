"""The files that `ds init` writes, from the templates next to this module: `@NAME@` is a placeholder."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.planning import report
from deepspeed.planning.report import size
from deepspeed.planning.step_time.shapes import is_shape
from deepspeed.tools.plan import build_model
from deepspeed.tools.starter.choices import LORA_RANK, Decision

SHARE = 0.7
"""Share of a device's memory that weights may take when serving, besides the KV cache."""

TEMPLATES = Path(__file__).with_name("templates")

BYTES = '''VOCABULARY = @VOCABULARY@


def encode(text: str) -> list[int]:
    """A byte is a token; put your tokenizer here."""
    return list(text.encode())


def build_model(config: dict | None) -> torch.nn.Module:
    """The model: called with input_ids and labels, it returns a dict with the loss. `config`: of DeepSpeed, for what
    is built in parts from the start at stage 3; None where the client takes care of that."""
    sharded = config is not None and config["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=sharded):
        model = @MAKE@
@AGAIN@    return model
'''

HUGGING_FACE = '''VOCABULARY = AutoConfig.from_pretrained(MODEL).get_text_config().vocab_size
KEPT = []


def encode(text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"]


def build_model(config: dict | None) -> torch.nn.Module:
    """The model. `config`: of DeepSpeed, which Transformers reads to build the model in parts at stage 3; None where
    the client tells it."""
    if config is not None and config["zero_optimization"]["stage"] == 3:
        KEPT.append(HfDeepSpeedConfig(config))  # as long as the model
    model = @MAKE@
    if CHECKPOINTING:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
'''
SET_CHECKPOINTING = "    model.checkpointing = CHECKPOINTING\n"
LORA = (
    f"get_peft_model(\n        {{}},\n        LoraConfig(r={LORA_RANK}, lora_alpha={2 * LORA_RANK}, "
    'target_modules="all-linear", task_type="CAUSAL_LM"),\n    )'
)
FROM_PRETRAINED = 'AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16")'


def launch_command(args: argparse.Namespace) -> str:
    """Return the command that starts the run, from within the folder."""
    if args.goal == "serve":
        model = shlex.quote(_path(args.model))
        many = (
            f"deepspeed --num_gpus {args.gpus} --module deepspeed.tools.serve {model} --tp-size {args.gpus}"
        )
        return f"ds serve {model}" if args.gpus == 1 else many
    hosts = f"--hostfile hostfile --num_nodes {args.nodes} " if args.nodes > 1 else ""
    return f"deepspeed {hosts}--num_gpus {args.gpus} {script_name(args)}"


def script_name(args: argparse.Namespace) -> str:
    return "run.py" if own_module(args) == "train" else "train.py"  # never hides the user's module


def own_module(args: argparse.Namespace) -> str | None:
    """Return the top-level module of a model given as module:function, else None."""
    if is_shape(args.model) or Path(args.model).exists():
        return None
    found = re.fullmatch(r"(\w+)(\.\w+)*:[\w.]+", args.model)
    return found[1] if found else None


def files(args: argparse.Namespace, decision: Decision) -> dict[str, str]:
    """Return the text of each file, by name."""
    config = decision.config
    values = {
        "LAUNCH": launch_command(args),
        "SCRIPT": script_name(args),
        **_task_values(args, decision),
    }
    written = {
        "ds_config.json": json.dumps(config, indent=2) + "\n",
        "task.py": _filled("task", values),
        script_name(args): _filled(f"train_{args.client}", values),
        "CHOICES.md": choices_page(args, decision),
    }
    if is_shape(args.model):
        written["model.py"] = _filled("model", values)
    if args.nodes > 1:
        written["hostfile"] = "".join(f"node-{n} slots={args.gpus}\n" for n in range(1, args.nodes + 1))
    return written


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _path(model: str) -> str:
    return str(Path(model).absolute()) if Path(model).exists() else model


def _task_values(args: argparse.Namespace, decision: Decision) -> dict[str, str]:
    """Return the placeholder values of task.py: its imports, and the code that builds the model."""
    request = decision.answer.request
    rows = [each.num_embeddings for each in request.module.modules() if isinstance(each, nn.Embedding)]
    vocabulary = str(getattr(getattr(request.module, "config", None), "vocab_size", min(rows, default=256)))
    own = "\nimport deepspeed\n"
    if is_shape(args.model):
        imports, made, again = ["from model import GPT"], _gpt(request.module.config), SET_CHECKPOINTING
    elif own_module(args) is not None:
        module, _, function = args.model.partition(":")
        imports, made, again = [], f"{function}()", ""
        here = json.dumps(str(Path.cwd()))
        own += f"\nsys.path.insert(0, {here})  # where the model's module lies\n"
        own += f"from {module} import {function.partition('.')[0]}  # noqa: E402\n"
    else:
        own, again = "", ""
        imports, made = _hugging_face(args, "bf16" in decision.config)
    build = HUGGING_FACE if not own else BYTES
    for name, value in (("MAKE", made), ("AGAIN", again), ("VOCABULARY", vocabulary)):
        build = build.replace(f"@{name}@", value)
    return {
        "SYS": "import sys\n" if "sys.path" in own else "",
        "IMPORTS": "\n".join(sorted([*imports, "from torch.utils.data import Dataset"])) + "\n" + own,
        "BUILD": build.rstrip(),
        "MODEL": json.dumps(_path(args.model)),
        "SEQUENCE": str(args.sequence),
        "CHECKPOINTING": str(request.checkpointing),
    }


def _gpt(config: Any) -> str:
    """Return the source of the call that builds the GPT of model.py."""
    numbers = {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "wide": config.intermediate_size,
        "gated": config.gated,
        "vocabulary": config.vocab_size,
        "sequence": "SEQUENCE",
    }
    return (
        "GPT(\n" + "".join(f"            {name}={value},\n" for name, value in numbers.items()) + "        )"
    )


def _hugging_face(args: argparse.Namespace, bf16: bool) -> tuple[list[str], str]:
    imports = [
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer",
        "from transformers.integrations import HfDeepSpeedConfig",
    ]
    if args.goal == "pretrain":
        return imports, "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))"
    made = FROM_PRETRAINED if bf16 else FROM_PRETRAINED.replace("bfloat16", "float32")
    if args.goal == "lora":
        return ["from peft import LoraConfig, get_peft_model", *imports], LORA.format(made)
    return imports, made


def choices_page(args: argparse.Namespace, decision: Decision) -> str:
    """Return the text of CHOICES.md: the reasons for the config, and the planned memory."""
    device = decision.answer.request.device_type
    again = f"ds plan ds_config.json --model {args.model} --gpus {args.gpus} --nodes {args.nodes}"
    lines = [
        f"# {args.model}: {args.goal} with {args.client} on {args.gpus * args.nodes} x {device}",
        "",
        *(f"- {reason}" for reason in decision.reasons),
        "- The learning rate is a common default for this goal; sweep it.",
        "",
        f"Start it here with `{launch_command(args)}`. Without `--data text.txt` it trains on random tokens, which",
        f"shows speed and memory only. Data and model are in `task.py`, the loop is in `{script_name(args)}`.",
        "",
        f"Planned memory (`{again} --sequence {args.sequence}` repeats it for this machine):",
        "",
        "```text",
        report.full_report(decision.answer, None),
        "```",
    ]
    return "\n".join(lines) + "\n"


def serving_files(args: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the files for serving and the reasons; sets ``args.gpus`` to the fewest tensor-parallel ranks that hold
    the model. DeepSpeedConfigError: it fits on no allowed number of ranks."""
    module = build_model(args.model, torch.bfloat16)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    config = getattr(module, "config", None)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    ways = [ranks for ranks in range(1, args.gpus + 1) if heads % ranks == 0]
    memory = args.host_memory if args.device == "cpu" else args.device_memory
    fitting = [ranks for ranks in ways if memory is None or weights / ranks <= SHARE * memory]
    if not fitting:
        raise DeepSpeedConfigError(
            f"{size(weights)} of weights in bf16 take more than {SHARE:.0%} of {size(memory or 0)} on each of "
            f"{ways[-1]} ranks: give more --gpus or more memory"
        )
    args.gpus = fitting[0]
    of = "unknown memory: give --device-memory to check it" if memory is None else f"{size(memory)} each"
    reasons = [
        f"Weights in bf16 take {size(weights)}: {args.gpus} of {ways[-1]} possible ranks hold them ({of}), "
        "the rest is for the key-value cache."
    ]
    return {"CHOICES.md": f"# Serving {args.model}\n\n- {reasons[0]}\n"}, reasons

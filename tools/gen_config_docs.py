"""Write `docs/config.md`, and the table of defaults in `docs/migrating.md`, from the schema; with `--check`, only
compare.
"""

from __future__ import annotations

import argparse
import enum
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deepspeed.config.availability import MISSING  # noqa: E402
from deepspeed.config.keys import (  # noqa: E402
    Key,
    constraint_of,
    documented_name,
    is_deprecated,
    keys_of,
    type_of,
    walk,
)
from deepspeed.config.schema import TrainingConfig  # noqa: E402
from deepspeed.config.section import LenientConfigModel, extra_facts  # noqa: E402
from deepspeed.inference.config import DeepSpeedInferenceConfig  # noqa: E402
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig  # noqa: E402

SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
TARGET = ROOT / "docs" / "config.md"
MIGRATING = ROOT / "docs" / "migrating.md"
DEFAULTS = ROOT / "tools" / "documented_defaults.json"
"""Keys whose default in the documents is not that of release 0.19: both values, whose is ours, and why."""
BEGIN, END = "<!-- defaults: begin -->", "<!-- defaults: end -->"

INTRODUCTION = """\
# Config

<!-- Written by tools/gen_config_docs.py from the schema; change the schema, not this file. -->

For anyone who looks up a key: this page lists every one of the config. `deepspeed.initialize(config=...)` takes a dict,
the path of a JSON or HJSON file, or urlsafe-base64 JSON text:

```json
{
  "train_batch_size": 64,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2}
}
```

All errors are reported at once, before any process group is created or memory is allocated: the key, its line in the
file, its value, what is allowed, and for a misspelt key the correct one. A key that occurs twice in an object is an
error, and so are more than 100 levels of nesting; long lists in messages are cut. Check a config without a model:

    ds_check config.json --gpus 8          # exit code 1 if there are errors
    ds_check config.json --fix             # also corrects what is unambiguous; keeps config.json.bak
    deepspeed.check_config(config, 8)      # the same from Python

**Numbers.** Whole floats such as `5e8` are accepted where an integer is expected. Sizes count elements
unless the description mentions bytes. Sizes of `zero_optimization` may be computed, as `0.9 * hidden * hidden` in the
documents of Transformers: what is behind the point is dropped.

**"auto".** Trainer and Accelerate fill in these values. A key whose value is still "auto" is treated as absent.
`initialize` says so if it is an argument of the optimizer, such as the learning rate.

**Optimizer.** The section `optimizer` or `scheduler` is not used, whatever it says, if one is passed to `initialize`.

**Batch sizes.** `train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks`,
where only data-parallel ranks count. Any two of the three determine the third; if only one batch size is given,
the number of accumulation steps is 1. The number of ranks comes from the model-parallel unit, the device mesh,
`torch.distributed` or the launcher's environment, in this order.

**Unknown keys.** At top level and in sections marked *lenient*, a key that differs from a known one by one
letter (or by two, from six letters on) is an error, unless the known one is present too; any other unknown key is
one warning, with the key that may be meant. In the other sections every unknown key is an error. Keys with a dot, and
comments (`_...`, `#...`, `//...`), are ignored.

**Deprecated keys** are accepted with a note, and their values are carried over if there is a new key.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the file and write nothing; exit code 1 if it is old",
    )
    args = parser.parse_args(argv)
    pages = {TARGET: render(), MIGRATING: with_defaults(MIGRATING.read_text(encoding="utf-8"))}
    old = [
        page for page, text in pages.items() if not page.exists() or page.read_text(encoding="utf-8") != text
    ]
    for page in old:
        if args.check:
            print(f"{page.relative_to(ROOT)} is not up to date: run python tools/gen_config_docs.py")
        else:
            page.write_text(pages[page], encoding="utf-8")
    return int(args.check and bool(old))


def render() -> str:
    lines = [INTRODUCTION, *not_implemented(), "## Top level", "", *table(TrainingConfig), ""]
    lines += sections(TrainingConfig, (), "###")
    for title, model in (
        ("init_inference", DeepSpeedInferenceConfig),
        ("Ragged inference engine", RaggedInferenceEngineConfig),
    ):
        lines += [
            f"## {title}",
            "",
            f"{(model.__doc__ or '').strip()} [Inference](inference.md) explains them.",
            "",
        ]
        lines += [*table(model), "", *sections(model, (), "###")]
    return "\n".join(lines).rstrip() + "\n"


def with_defaults(page: str) -> str:
    """The page with a current table between its two markers."""
    before, rest = page.split(BEGIN)
    return "\n".join((before + BEGIN, "", *defaults(), "", END + rest.split(END)[1]))


def defaults() -> Iterator[str]:
    """One row per key of ``DEFAULTS``; the column of this package holds what the schema says."""
    ours = {".".join(path): default_of(key) for path, key in walk(TrainingConfig)}
    yield "| key | documents | release 0.19 | here | why |"
    yield "|---|---|---|---|---|"
    for row in json.loads(DEFAULTS.read_text(encoding="utf-8")):
        cells = (f"`{row['key']}`", *map(in_cell, (row["document"], row["release"])), ours[row["key"]])
        yield f"| {' | '.join(cells)} | {row['why']} |"


def in_cell(value: Any) -> str:
    """A default of ``DEFAULTS`` as `default_of` writes one of the schema."""
    return "needed" if value == "<required>" else f"`{json.dumps(value)}`"


def not_implemented() -> Iterator[str]:
    yield "## Not implemented in this release"
    yield ""
    yield "These keys are known and checked, but turning their feature on is an error that names them:"
    yield ""
    yield from listed(changing=True)
    yield ""
    yield "These cannot change the results of a run; turning them on is one warning:"
    yield ""
    yield from listed(changing=False)
    yield ""


def listed(*, changing: bool) -> Iterator[str]:
    rows = (row for row in MISSING if row.changes_numbers == changing)
    return (f"- `{row.key}`{row.value and f' ({row.value})'}: {row.instead}" for row in rows)


def sections(model: type[BaseModel], path: tuple[str, ...], heading: str) -> Iterator[str]:
    """One chapter per section below `model`, depth first."""
    for name, field in model.model_fields.items():
        key = keys_of(model)[name]
        if key.section is None:
            continue
        here = (*path, documented_name(name, field), *(("<name>",) if key.container == "dict" else ()))
        shown = ".".join(here) + ("[]" if key.container == "list" else "")
        doc = " ".join((key.section.__doc__ or "").split()) if key.section.__doc__ else ""
        lenient = " *Lenient.*" if issubclass(key.section, LenientConfigModel) else ""
        yield from (f"{heading} `{shown}`", "")
        if doc or lenient:
            yield from (f"{doc}{lenient}".strip(), "")
        yield from (*table(key.section), "")
        yield from sections(key.section, here, heading)


def table(model: type[BaseModel]) -> Iterator[str]:
    yield "| key | type | default | constraint | meaning |"
    yield "|---|---|---|---|---|"
    for name, field in model.model_fields.items():
        key = keys_of(model)[name]
        spelling = documented_name(name, field)
        others = sorted({field.alias or name, name} - {spelling})
        meaning = field.description or ""
        if others:
            meaning += f" Also: {', '.join(f'`{other}`' for other in others)}."
        if is_deprecated(field):
            meaning = f"*Deprecated.* {meaning}"
        cells = (f"`{spelling}`", type_of(field), default_of(key), constraint(key), meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def constraint(key: Key) -> str:
    if key.section is not None and key.container is None:
        return "see below"
    required = "needed when enabled" if extra_facts(key.field).get("required_when_enabled") else ""
    return "; ".join(part for part in (constraint_of(key.field), required) if part)


def default_of(key: Key) -> str:
    if key.field.is_required():
        return "needed"
    default = key.field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return "`{}`"
    if isinstance(default, enum.Enum):
        default = default.value
    if isinstance(default, torch.dtype):
        default = SHORT[default]
    return f"`{json.dumps(_plain(default))}`"


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


if __name__ == "__main__":
    raise SystemExit(main())

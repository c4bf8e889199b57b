"""The recipes of compression in a short form: what they save is small, and still knows what the teacher knew."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.compression.packed import PackedWeight
from tests.pool import distributed
from tests.tools.launcher.programs import REPOSITORY

FOLDER = REPOSITORY / "examples" / "compression"
SHORT = ["--hidden", "32", "--layers", "2", "--steps", "60", "--batch", "64", "--lr", "1e-2"]


def part(name: str) -> Any:
    """A module of the example, which runs as scripts do: its folder is on the path. Nothing of it stays imported."""
    own = {path.stem for path in FOLDER.glob("*.py")}
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for each in own & set(sys.modules):
            del sys.modules[each]


@distributed(world_size=1)
def test_zeroquant(tmp_path: Path) -> None:
    zeroquant = part("zeroquant")
    arguments = [
        *SHORT,
        "--bits",
        "8",
        "1",
        "--layer-steps",
        "30",
        "--layer-lr",
        "2e-3",
        "--output",
        str(tmp_path),
    ]
    teacher, eight, rounded, taught = zeroquant.main(arguments).rows
    assert teacher[1] > 0.5  # of ten classes
    assert abs(eight[1] - teacher[1]) < 0.02 and 3 * eight[2] < teacher[2]
    assert taught[1] > rounded[1] and taught[2] <= rounded[2] + 512 < eight[2]
    sizes = zeroquant.Sizes(hidden=32, inner=128, layers=2)
    config = zeroquant.quantization(8, 32)
    skeleton = redundancy_clean(init_compression(zeroquant.Classifier(sizes), config), config, packed=True)
    skeleton.load_state_dict(torch.load(tmp_path / "w8_False.pt"))
    packed = [name for name, module in skeleton.named_modules() if isinstance(module, PackedWeight)]
    assert len(packed) == 2 + 6 * 2
    data = zeroquant.Snippets(sizes.length)
    assert zeroquant.accuracy(skeleton, data) == eight[1]


@distributed(world_size=1)
def test_extreme_compression(tmp_path: Path) -> None:
    xtc = part("xtc")
    arguments = [*SHORT, "--student-steps", "60", "--output", str(tmp_path)]
    teacher, ternary, binary = xtc.main(arguments).rows
    assert min(ternary[1], binary[1]) > 0.5 * teacher[1] > 0.1
    assert 8 * ternary[2] < teacher[2] and binary[2] < 0.8 * ternary[2]


@distributed(world_size=1)
def test_techniques_of_the_config(tmp_path: Path) -> None:
    run = part("from_config")
    short = ["--hidden", "32", "--batch", "32", "--lr", "1e-2", "--steps", "50", "--more-steps", "20"]
    tables = run.main([*short, "--output", str(tmp_path)])
    text, pictures = (
        {name: (right, size) for name, right, size in tables[task].rows} for task in ("text", "pictures")
    )
    whole, size = text.pop("text, whole")
    assert whole > 0.3 and all(right > 0.6 * whole for right, _ in text.values())  # of ten classes
    small = {name: torch.load(tmp_path / f"{name}.pt") for name in run.TECHNIQUES}
    assert small["row_pruning"]["layer.0.output.dense.weight"].shape == (32, 64)  # of 128 inner features
    assert small["head_pruning"]["layer.3.attention.self.value.weight"].shape == (16, 32)
    assert not [name for name in small["layer_reduction"] if name.startswith("layer.2")]
    assert text["weight_quantization"][1] < text["activation_quantization"][1] < size
    for block in range(2):
        assert small["channel_pruning"][f"blocks.{block}.conv2.weight"].shape == (16, 8, 3, 3)
    for name, share in {"sparse_pruning": 0.5, "snip_momentum": 0.4}.items():
        weights = [
            each
            for key, each in small[name].items()
            if re.fullmatch(r"layer.*\.weight", key) and each.dim() == 2
        ]
        assert sum(int(each.count_nonzero()) for each in weights) / sum(
            each.numel() for each in weights
        ) == pytest.approx(share, abs=0.05)
    assert pictures["channel_pruning"][0] > 0.7 * pictures["pictures, whole"][0] > 0.4  # of four classes


@distributed(world_size=1)
def test_some_techniques_of_the_config(tmp_path: Path) -> None:
    short = ["--hidden", "32", "--batch", "8", "--steps", "2", "--more-steps", "2", "--output", str(tmp_path)]
    tables = part("from_config").main([*short, "--only", "row_pruning", "channel_pruning"])
    assert [name for table in tables.values() for name, _, _ in table.rows if "whole" not in name] == [
        "row_pruning",
        "channel_pruning",
    ]


@distributed(world_size=1)
def test_moq() -> None:
    moq = part("moq")
    short = ["--hidden", "32", "--batch", "32", "--lr", "1e-2", "--steps", "24"]
    found = moq.main([*short, "--start-bits", "8", "--target-bits", "6", "--eigenvalue"])
    assert found["bf16"][1] == 64 >= found["MoQ"][1]  # 32 x 32 weights in 16 groups; 6 bits are 63 values
    assert found["MoQ"][0] > 0.8 * found["bf16"][0]

"""The recipes of compression in a short form: what they save is small, and still knows what the teacher knew."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

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

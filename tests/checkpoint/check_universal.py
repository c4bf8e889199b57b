"""Has DeepSpeed 0.19.8 itself load what our ``ds_to_universal`` makes, and compares its state with ours.

Not part of the suite. Needs a Python in which that release is installed:

    PYTHONPATH=. python tests/checkpoint/check_universal.py PYTHON_WITH_0_19 [CASE ...]

A case such as ``2-bf16-1-3`` is a stage there, a precision, a number of ranks there, and the stage at which our engine
trained on two ranks. Whole masters and moments of every parameter, counters, loss scale and schedule must equal what
our engine held, bit for bit, and one more training step must work.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CASES = ["1-fp32-2-2", "2-bf16-2-3", "2-bf16-1-1", "1-fp16-3-0", "3-bf16-2-3", "3-fp32-1-1"]


def check(python: str, case: str) -> str:
    import torch

    from deepspeed.checkpoint.foreign.universal_export import convert
    from tests.checkpoint import check_exports
    from tests.checkpoint.make_upstream_checkpoints import launch
    from tests.checkpoint.models import save_as_fixtures_were
    from tests.pool import run

    there, precision, world, here = case.split("-")
    with tempfile.TemporaryDirectory() as scratch:
        own, out, loaded_file = Path(scratch, "own"), Path(scratch, "made"), Path(scratch, "loaded.pt")
        made = run(save_as_fixtures_were, 2, folder=str(own), stage=int(here), precision=precision)[0]
        convert(own / "global_step3", out / "universal", zero_stage=int(there), inject_missing_state=True)
        settings = json.dumps({"checkpoint": {"load_universal": True}})
        arguments = (str(out), there, precision, str(loaded_file), settings)
        launch(python, int(world), *arguments, script=str(check_exports.__file__))
        loaded = torch.load(loaded_file)
    assert (loaded["client"]["epoch"], loaded["steps"]) == (3, 3), (loaded["client"], loaded["steps"])
    assert loaded["schedule"] == made["schedule"], loaded["schedule"]
    if precision == "fp16":
        assert loaded["scale"] == made["scale"], loaded["scale"]
    expected = {key: value for key, value in made["state"].items() if not key.endswith("/step")}
    assert loaded["state"].keys() == expected.keys(), loaded["state"].keys() ^ expected.keys()
    for key, value in loaded["state"].items():
        assert torch.equal(value.float().view(-1), expected[key].view(-1)), key
    for name, value in loaded["weights"].items():
        if name.startswith("frozen"):
            continue  # that release reads no frozen weights from any universal checkpoint
        assert torch.equal(value, made["weights"][name]), f"weight {name}"
    assert 0 < loaded["loss"] < 10, loaded["loss"]
    return f"{case}: {len(expected)} tensors equal"


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
    main()

"""Build the source archive and, from it, the wheel; then try the wheel where nothing else of this checkout is.

    python tools/wheel.py FOLDER

Building takes scikit-build-core, CMake, Ninja and a C++ compiler, but no torch. The wheel is built from the unpacked
archive, so that what was tried is also what the archive gives. It is tried in a new virtual environment that has this
wheel alone and finds torch and the other packages in the environment of this Python; where one of them is missing,
the wheel is built and not tried.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "deepspeed/lib/libdeepspeed_host" + (".dylib" if sys.platform == "darwin" else ".so")

TRIAL = """
import pathlib, sys, torch, deepspeed
from deepspeed.ops import native
from deepspeed.ops.adam import DeepSpeedCPUAdam
assert pathlib.Path(deepspeed.__file__).is_relative_to(sys.prefix), f"not the wheel: {deepspeed.__file__}"
assert native.isa(), "the native library was not loaded: its operations run in PyTorch"
model = torch.nn.Linear(64, 1)
config = {"train_micro_batch_size_per_gpu": 16,
          "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
          "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
engine, optimizer, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=True)
assert isinstance(engine.basic_optimizer, DeepSpeedCPUAdam), type(engine.basic_optimizer)
inputs, losses = torch.randn(16, 64), []
for _ in range(20):
    loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print(f"trained 20 steps with the {native.isa()} kernels: loss {losses[0]:.3f} to {losses[-1]:.3f}")
"""


def build(folder: Path, scratch: Path) -> tuple[Path, Path]:
    """Return the source archive of the checkout and the wheel that the archive gives, both in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / _call_backend("build_sdist", folder, ROOT)
    shutil.unpack_archive(archive, scratch)
    print("compiling the native library: about 200 s of one core, shared between all there are", flush=True)
    return archive, folder / _call_backend(
        "build_wheel", folder, scratch / archive.name.removesuffix(".tar.gz")
    )


def _call_backend(hook: str, folder: Path, source: Path) -> str:
    """Return the name of the file that a hook of the build backend (PEP 517) wrote into ``folder``."""
    code = f"import sys; from scikit_build_core import build; print('\\n' + build.{hook}(sys.argv[1]))"
    run = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(run, cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{hook} failed: see above")
    return done.stdout.split()[-1]


def missing_files(wheel: Path) -> list[str]:
    """Return what the wheel lacks of the package's files in the checkout, the stubs and the native library."""
    sources = ROOT / "deepspeed"
    files = (file for file in sources.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    wanted = {file.relative_to(ROOT).as_posix() for file in files if file.parent != sources / "lib"}
    wanted |= {LIBRARY, *runpy.run_path(str(ROOT / "tools" / "write_stubs.py"))["stubs"]()}
    with zipfile.ZipFile(wheel) as packed:
        return sorted(wanted - set(packed.namelist()))


def missing_packages(wheel: Path) -> list[str]:
    """Return the packages that the wheel needs and that this environment lacks."""
    with zipfile.ZipFile(wheel) as packed:
        name = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        fields = HeaderParser().parsestr(packed.read(name).decode())
    wanted = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in wanted]
    return [name for name in names if importlib.util.find_spec(name) is None]


def system_versions(wheel: Path) -> str:
    """Return the newest versions of the system's libraries that the native library asks for: "GLIBC 2.34"."""
    with zipfile.ZipFile(wheel) as packed:
        asked = re.findall(rb"\0(GLIBC|GLIBCXX)_([\d.]+)(?=\0)", packed.read(LIBRARY))
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in asked:
        numbers = tuple(map(int, version.split(b".")))
        newest[name.decode()] = max(newest.get(name.decode(), ()), numbers)
    return ", ".join(f"{name} {'.'.join(map(str, numbers))}" for name, numbers in sorted(newest.items()))


def environment(wheel: Path, folder: Path) -> Path:
    """Make a virtual environment with the wheel and, behind it, the packages of this one. Return its programs."""
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    run = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check"]
    subprocess.run([*run, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    (installed,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (installed / "packages_of_the_checkout.pth").write_text("\n".join(others) + "\n")
    return programs


def try_it(programs: Path, scratch: Path) -> None:
    """Run the package's commands and a short training outside the checkout; leave with an error if one fails."""
    script = scratch / "trial.py"
    script.write_text(TRIAL)
    variables = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    for command in (["ds", "--help"], ["deepspeed", "--help"], ["ds_report"], ["python", str(script)]):
        run = [str(programs / command[0]), *command[1:]]
        done = subprocess.run(
            run, cwd=scratch, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\n{' '.join(command)} failed in an environment that has only the wheel")
    print(done.stdout.splitlines()[-1])


def main(folder: Path) -> None:
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        sys.exit(
            "no C++ compiler, and a wheel without the native library is slower everywhere: install g++ or clang++"
        )
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        archive, wheel = build(folder.resolve(), scratch)
        for file in (archive, wheel):
            print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
        if missing := missing_files(wheel):
            sys.exit(f"the wheel lacks {', '.join(missing)}")
        print(f"everything is in it; its native library needs {system_versions(wheel)} or newer")
        if absent := missing_packages(wheel):
            print(f"not tried: {', '.join(absent)} not installed here (`make test` installs everything)")
            return
        try_it(environment(wheel, scratch / "environment"), scratch)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

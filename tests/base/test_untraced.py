"""`untraced` marks a function before the compiler is imported, and the compiler respects the mark as if it were its
own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys, torch
from deepspeed.base.tracing import untraced

traced = []

def below(x):
    traced.append(torch.compiler.is_compiling())
    return x * 2 + 1

def hook(module, args):
    below(args[0])

if "HOW" == "ours":
    hook = untraced(hook)
    assert "torch._dynamo" not in sys.modules
elif "HOW" == "torch":
    hook = torch.compiler.disable(hook)

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).sin()).cos()

graphs = []

def backend(graph, inputs):
    graphs.append(len(graph.graph.nodes))
    return graph.forward

model = Two()
model.second.register_forward_pre_hook(hook)
model.compile(backend=backend)
for _ in range(3):
    model(torch.ones(2, 4))
from torch._dynamo.utils import counters
print(traced, graphs, list(counters["graph_break"].values()), dict(counters["frames"]))
"""


def run(how: str) -> str:
    done = forked.run(["-c", CODE.replace("HOW", how)], env=dict(os.environ), cwd=ROOT, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def as_torch_does_it() -> str:
    return run("torch")


def test_the_same_graphs_as_with_the_compilers_own_decorator(as_torch_does_it: str) -> None:
    assert as_torch_does_it.startswith("[False, False, False]")
    assert run("ours") == as_torch_does_it


def test_without_it_the_hook_would_be_traced(as_torch_does_it: str) -> None:
    assert run("plain").startswith("[True")

"""Each kernel that the package launches is interpreted and compiled by the tests of its module. Needs no Triton."""

from __future__ import annotations

import ast
from pathlib import Path

import deepspeed

PACKAGE = Path(deepspeed.__file__).parent
TESTS = {
    "adam/triton_adam": "test_adam",
    "gpu/block_sparse_attention": "test_block_sparse_attention",
    "gpu/compact_adam": "test_few_bits",
    "gpu/dropout": "test_layers",
    "gpu/evoformer_attention": "test_evoformer_attention",
    "gpu/gates": "test_layers",
    "gpu/grouped_gemm": "test_products",
    "gpu/integer_products": "test_products",
    "gpu/norms": "test_layers",
    "gpu/codecs": "test_payloads",
    "gpu/paged_attention": "test_paged_attention",
    "gpu/rotary": "test_layers",
    "gpu/sampling": "test_sampling",
    "gpu/small_floats": "test_few_bits",
    "gpu/trial": "test_trial",
}
"""Files below `deepspeed/ops`, and where their kernels are tested."""


def launched(tree: ast.Module) -> set[str]:
    """Functions of a module that `@triton.jit` decorates and that it launches: `kernel[grid](..)`."""
    kernels = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    }
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return kernels & {ast.unparse(call.value) for call in calls if isinstance(call, ast.Subscript)}


def test_each_kernel_has_both_tests() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "@triton.jit" in text and (names := launched(ast.parse(text))):
            found[path.relative_to(PACKAGE / "ops").with_suffix("").as_posix()] = names
    assert found.keys() == TESTS.keys()
    for module, names in found.items():
        tree = ast.parse((Path(__file__).parent / f"{TESTS[module]}.py").read_text(encoding="utf-8"))
        kinds: dict[str, set[str]] = {"interpreted": set(), "compiling": set()}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                for decorator in map(ast.unparse, node.decorator_list):
                    kinds.get(decorator, set()).add(node.name)
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert all(kinds.values()) and names <= texts, (
            f"{TESTS[module]} has to test {sorted(names)} of {module}"
        )

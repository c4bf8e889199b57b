"""Memory on huge pages: contents and addresses stay, and only memory that mostly is the tensors' is touched."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from deepspeed.ops import huge_pages
from deepspeed.ops.huge_pages import HUGE_PAGE, collapse, weights_of


def large_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes in huge pages of the mapping in which the tensor begins."""
    begin = tensor.data_ptr()
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if bounds and int(bounds[1], 16) <= begin < int(bounds[2], 16):
            found = re.search(r"AnonHugePages:\s*(\d+) kB", entry)
            return int(found[1]) * 1024 if found else 0
    raise AssertionError("no mapping has it")


def aligned(size: int) -> torch.Tensor:
    """Bytes that begin where a large page does."""
    whole = torch.zeros(size + HUGE_PAGE, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + size]


def test_weights_are_what_they_were_and_where_they_were():
    weights = [torch.randn(1 << 20) for _ in range(4)]
    before, addresses = [each.clone() for each in weights], [each.data_ptr() for each in weights]
    found = collapse(weights)
    assert [each.data_ptr() for each in weights] == addresses
    for weight, was in zip(weights, before, strict=True):
        assert torch.equal(weight, was)
    if found == 0:
        pytest.skip("this system does not collapse pages")
    assert found % HUGE_PAGE == 0
    assert large_bytes(weights[0]) > 0
    assert collapse(weights) == found  # those that are large already count


def test_pages_are_those_that_tensors_mostly_fill(advised):
    memory = aligned(5 * HUGE_PAGE)
    half = HUGE_PAGE // 2
    lone = memory[: half - 1]  # a little less than half of page 0
    shared = memory[HUGE_PAGE : HUGE_PAGE + half // 2], memory[2 * HUGE_PAGE - half // 2 : 2 * HUGE_PAGE]
    across = memory[2 * HUGE_PAGE + half : 4 * HUGE_PAGE + 1]  # half of 2, all of 3, a byte of 4
    again = across.view(across.shape)  # a tied weight counts once
    collapse([lone, *shared, across, again])
    numbers = sorted((begin - memory.data_ptr()) // HUGE_PAGE for begin, _ in advised)
    assert numbers == [1, 2, 3]
    assert {size for _, size in advised} == {HUGE_PAGE}


def test_a_system_that_does_not_find_pages_is_not_asked_forever(advised, monkeypatch):
    clock = itertools.count(step=0.75)
    monkeypatch.setattr(huge_pages, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert collapse([aligned(8 * HUGE_PAGE)]) == HUGE_PAGE  # at 0.75 s of 1.03; the next would be at 1.5
    assert len(advised) == 1


def test_what_has_no_memory_of_its_own_is_left_alone(advised):
    wrapper = TwoTensor(torch.zeros(HUGE_PAGE), torch.zeros(HUGE_PAGE))
    strided = torch.zeros(2, HUGE_PAGE).T
    assert collapse([wrapper, strided, torch.zeros(HUGE_PAGE, device="meta"), torch.zeros(0)]) == 0
    assert advised == []


def test_a_mapped_file_stays_readable(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (4 * HUGE_PAGE // 256))
    mapped = torch.from_file(str(path), shared=False, size=4 * HUGE_PAGE, dtype=torch.uint8)
    collapse([mapped])
    assert bytes(mapped[-256:].tolist()) == bytes(range(256))


def test_without_the_call_nothing_happens(monkeypatch):
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert collapse([torch.zeros(HUGE_PAGE)]) == 0


def test_weights_of_a_module_are_its_parameters_and_buffers():
    norm = nn.BatchNorm1d(2)
    assert {id(each) for each in weights_of(norm)} == {
        id(each) for each in (*norm.parameters(), *norm.buffers())
    }

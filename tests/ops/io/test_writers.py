"""Writers under `torch.save`, compared with the file that torch writes without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed.ops.aio.async_io import aio_handle
from deepspeed.ops.io import FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter


def model_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1000, 300), (7,), (513, 65), (0,), (1,)]
    return {f"w{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def config(nbytes: int, **options: object) -> FastFileWriterConfig:
    handle = aio_handle(block_size=65536, queue_depth=8)
    pinned = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    return FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=pinned, **options)


@pytest.mark.parametrize("nbytes", [1 << 22, 1 << 20, 100_000, 1111])
@pytest.mark.parametrize("double_buffer", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_save(tmp_path: Path, nbytes: int, double_buffer: bool, zipped: bool) -> None:
    state = model_state()
    if nbytes == 1111:
        state = {"small": state["w2"][:20]}
    path = str(tmp_path / "fast.pt")
    with FastFileWriter(path, config(nbytes, double_buffer=double_buffer)) as writer:
        torch.save(state, writer, _use_new_zipfile_serialization=zipped)
    loaded = torch.load(path, weights_only=True)
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[k], state[k]) for k in state)


def test_all_writers_see_the_same_bytes(tmp_path: Path) -> None:
    state = model_state()
    paths = {name: str(tmp_path / name) for name in ("fast", "plain")}
    with FastFileWriter(paths["fast"], config(1 << 16)) as fast:
        torch.save(state, fast)
    with PyFileWriter(paths["plain"]) as plain:
        torch.save(state, plain)
    mock = MockFileWriter("nowhere")
    torch.save(state, mock)
    assert Path(paths["fast"]).stat().st_size == Path(paths["plain"]).stat().st_size == mock.num_bytes
    assert mock.file_path() == "nowhere" and not Path("nowhere").exists()


def test_write_flush_and_reopen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old contents that are longer")
    writer = FastFileWriter(str(path), config(4096))
    assert writer.write(b"abc") == 3 and writer.write(torch.tensor([1.0])) == 4
    writer.flush()
    assert path.read_bytes() == b"abc" + torch.tensor([1.0]).numpy().tobytes()
    assert writer.write(memoryview(b"tail")) == 4 and writer.write(b"") == 0
    writer.close()
    writer.close()
    assert path.read_bytes()[7:] == b"tail"
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"x")


def test_storages(tmp_path: Path) -> None:
    path = tmp_path / "file"
    storages = [torch.arange(n, dtype=torch.float32).untyped_storage() for n in (10, 20, 30)]
    with FastFileWriter(str(path), config(4096)) as writer:
        assert writer.split_index_list(storages, 2) == [2, 3]
        assert writer.split_index_list(storages, 5)[-1] == 3
        assert writer.save_torch_storage_object_list(storages, True) == [0, 48, 136]
    data = path.read_bytes()
    assert len(data) == 264 and int.from_bytes(data[48:56], "little") == 80
    assert data[56:136] == bytes(storages[1])


def test_configuration_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_parallel_writers = 2"):
        config(4096, num_parallel_writers=2)
    with pytest.raises(ValueError, match="pinned_tensor is empty"):
        config(0)
    with pytest.raises(FileNotFoundError):
        FastFileWriter(str(tmp_path / "no" / "file"), config(4096))

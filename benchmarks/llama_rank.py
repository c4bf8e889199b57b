"""llama.cpp as a rank of a benchmark, in an environment of its own: `llama-cpp-python` and NumPy, nothing of ours."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy


class Llama:
    """Greedy tokens of a model from a file, by llama.cpp's own calls, without Python's classes around them."""

    def __init__(self, path: str, threads: int, longest: int, batch: int) -> None:
        llama_cpp.llama_backend_init()
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        settings = llama_cpp.llama_model_default_params()
        settings.use_extra_bufts = False  # weights that are packed anew crash on some processors
        self.file = Path(path)
        self.model: Any = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx = batch * longest
        asked.n_batch = asked.n_ubatch = max(512, batch)
        asked.n_seq_max = batch
        asked.n_threads = asked.n_threads_batch = threads
        self.context: Any = llama_cpp.llama_init_from_model(self.model, asked)
        if not self.context:
            raise RuntimeError("llama.cpp makes no context")
        self.batch: Any = llama_cpp.llama_batch_init(max(512, batch), 0, 1)

    def run(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds to generate ``tokens`` for each of the prompts, less the time of the prompts."""
        last = self._prompts(prompts)
        begin = time.perf_counter()
        for step in range(tokens):
            last = self._step(last, [len(prompt) + step for prompt in prompts])
        return time.perf_counter() - begin

    def tokens(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy."""
        chosen = self._prompts([prompt])
        for step in range(tokens - 1):
            chosen.append(self._step(chosen[-1:], [len(prompt) + step])[0])
        return chosen

    def weights(self) -> int:
        """Bytes of the file but those of the embedding, of which a step reads rows: it is as large as the matrix of the
        head."""
        return llama_cpp.llama_model_size(self.model) - self._embedding()

    def _embedding(self) -> int:
        width = llama_cpp.llama_model_n_embd(self.model)
        bits = {"fp32": 32.0, "bf16": 16.0, "int8": 8.5, "int4": 4.5}[self.file.stem.split("-")[-1]]
        return int(self.vocabulary * width * bits / 8)

    def _prompts(self, prompts: list[list[int]]) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        chosen = []
        for sequence, prompt in enumerate(prompts):
            rows = [(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)]
            chosen += self._decode(rows, [len(prompt) - 1])
        return chosen

    def _step(self, last: list[int], positions: list[int]) -> list[int]:
        rows = [(token, at, row, True) for row, (token, at) in enumerate(zip(last, positions, strict=True))]
        return self._decode(rows, list(range(len(rows))))

    def _decode(self, rows: list[tuple[int, int, int, bool]], wanted: list[int]) -> list[int]:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        found = [llama_cpp.llama_get_logits_ith(self.context, row) for row in wanted]
        return [int(numpy.ctypeslib.as_array(each, (self.vocabulary,)).argmax()) for each in found]

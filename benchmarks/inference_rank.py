"""One rank of inference.py: a Llama that decodes and serves, by Transformers or by ours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "88M": {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
    "tiny": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
}


def make_model(shape: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = {"88M": (12, 4), "tiny": (4, 2)}[shape]
    config = LlamaConfig(
        **SHAPES[shape],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().to(dtype)


def requests(count: int, vocabulary: int, longest: int) -> list[tuple[list[int], int]]:
    """Prompts and the number of tokens wanted: lengths spread over a factor of eight, the same in every run."""
    draw = torch.Generator().manual_seed(1)

    def length() -> int:
        return int(torch.randint(longest // 8, longest + 1, (1,), generator=draw))

    return [
        (torch.randint(0, vocabulary, (length(),), generator=draw).tolist(), length()) for _ in range(count)
    ]


class Inference:
    """One rank that decodes, or serves, with ``system``: transformers, compiled (the same by torch.compile, with a
    static cache), ours, kernels (ours with kernel injection), generate (of the engine with kernels)."""

    def __init__(self, system: str, shape: str, precision: str, longest: int) -> None:
        import transformers

        import deepspeed

        transformers.logging.set_verbosity_error()
        self.system, self.longest = system, longest
        module = make_model(shape, torch.bfloat16 if precision == "bf16" else torch.float32)
        self.generate = module.generate
        if system in ("kernels", "generate"):
            settings: dict[str, Any] = {"dtype": {"fp32": "fp32", "bf16": "bf16"}.get(precision, "int8")}
            if precision == "int4":
                settings["quant"] = {"weight": {"num_bits": 4, "q_groups": 1}}
            engine = deepspeed.init_inference(module, replace_with_kernel_inject=True, **settings)
            module, self.generate = engine.module, engine.generate
        self.module, self.vocabulary = module, SHAPES[shape]["vocab_size"]
        self.settings: dict[str, Any] = {}
        if system == "compiled":  # as Transformers' page on static caches has it
            module.forward = torch.compile(module.forward, fullgraph=True)
            self.settings = {"cache_implementation": "static"}
        self.generator: Any = None
        self.runner: Any = None

    def run(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds to generate ``tokens`` for each of the prompts, less the time of the prompts."""
        work = self._by_ours if self.system in ("ours", "kernels") else self._by_transformers
        one = work([(each, 1) for each in prompts])
        return work([(each, tokens + 1) for each in prompts]) - one

    def tokens(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy, by ``generate``."""
        found = self.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0, **self.settings
        )
        return found[0, len(prompt) :].tolist()

    def serve(self, count: int, batch: int) -> float:
        """Seconds for ``count`` mixed requests, ``batch`` at a time (Transformers; 0: by its continuous batching)."""
        wanted = requests(count, self.vocabulary, self.longest)
        if self.system != "transformers":
            return self._by_ours(wanted)
        if batch == 0:
            return self._by_continuous_batching(wanted)
        return sum(self._by_transformers(wanted[at : at + batch]) for at in range(0, count, batch))

    def _by_transformers(self, wanted: Sequence[tuple[list[int], int]]) -> float:
        """A batch runs until its longest answer ends; shorter prompts are padded on the left."""
        width, new = max(len(prompt) for prompt, _ in wanted), max(tokens for _, tokens in wanted)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in wanted])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in wanted])
        begin = time.perf_counter()
        self.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **self.settings,
        )
        return time.perf_counter() - begin

    def _by_continuous_batching(self, wanted: Sequence[tuple[list[int], int]]) -> float:
        """Less the time to set it up. Answers end where they should: checked."""
        from transformers import GenerationConfig

        greedy = GenerationConfig(
            do_sample=False, max_new_tokens=self.longest, eos_token_id=-1, pad_token_id=0
        )
        with self.module.continuous_batching_context_manager(greedy) as manager:
            begin = time.perf_counter()
            numbers = {manager.add_request(prompt, max_new_tokens=new): new for prompt, new in wanted}
            while numbers:
                found = manager.get_result(timeout=1)
                if found is None and not manager.is_running():
                    raise RuntimeError(f"it stopped with {len(numbers)} requests left")
                if found is not None and found.is_finished():
                    assert len(found.generated_tokens) == numbers.pop(found.request_id)
            return time.perf_counter() - begin

    def _by_ours(self, wanted: Sequence[tuple[list[int], int]]) -> float:
        from deepspeed.inference.generation.generator import Generator
        from deepspeed.inference.scheduling.requests import SamplingParams

        if self.generator is None:
            self.generator = Generator(
                self.module, max_length=2 * self.longest + 1, max_sequences=64, prefix_sharing=False
            )
        settings = [SamplingParams(max_new_tokens=tokens) for _, tokens in wanted]
        begin = time.perf_counter()
        self.generator.generate([prompt for prompt, _ in wanted], settings)
        return time.perf_counter() - begin

    def first_tokens(
        self, budget: int, arrivals: list[list[int]], gaps: list[float], tokens: int, share: float = 0.5
    ) -> list[float]:
        """Seconds from the arrival of each request to its first token, in an open loop: requests come when they come,
        whether or not others are done. ``arrivals``: their prompts; ``gaps``: seconds from one to the next; ``share``:
        of short prompts."""
        from deepspeed.inference.generation.generator import Generator
        from deepspeed.inference.scheduling.requests import Request, SamplingParams

        if self.runner is None:
            self.runner = Generator(self.module, num_blocks=1).runner
        generator = Generator(
            self.runner,
            token_budget=budget,
            max_length=2048,
            max_sequences=32,
            short_share=share,
            prefix_sharing=False,
        )
        params, started = SamplingParams(max_new_tokens=tokens), time.perf_counter()
        due = [sum(gaps[: i + 1]) for i in range(len(gaps))]
        submitted: list[Request] = []
        waited: dict[int, float] = {}
        while len(waited) < len(arrivals) or generator.has_work:
            now = time.perf_counter() - started
            while len(submitted) < len(due) and due[len(submitted)] <= now:
                submitted.append(generator.submit(arrivals[len(submitted)], params))
            if not generator.has_work:
                time.sleep(max(due[len(submitted)] - now, 0.0))
                continue
            for request in generator.step(unchanged=True):
                place = request.id - submitted[0].id
                waited.setdefault(place, time.perf_counter() - started - due[place])
        return [waited[place] for place in range(len(arrivals))]

    def filled(self) -> list[int]:
        """Forwards with as many tokens as the budget, and those with fewer although requests were waiting."""
        return [0, 0] if self.generator is None else [self.generator.counts.full, self.generator.counts.short]

    def weights(self) -> int:
        """Bytes of weights that a step of decoding reads: all but the embedding, of which it reads rows."""
        embedding = {id(each) for each in self.module.get_input_embeddings().parameters()}
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(each.nbytes for each in tensors if id(each) not in embedding)

"""From a model of Transformers to text: generate with it, quantize it, serve many requests at once.

    python examples/generate_text/generate.py               # a small model, trained here first
    python examples/generate_text/generate.py --model FOLDER --prompt "Once"    # any folder that save_pretrained wrote
    deepspeed --num_gpus 2 examples/generate_text/generate.py --model FOLDER    # its layers split over two ranks
    ds serve OUTPUT/model                                                       # the same engine behind HTTP

Shows that the engine's tokens are those of Transformers' own ``generate``, alone and when many requests share the
forwards, and when the weights are in a file instead of in memory; what int8 weights change; and how many tokens per
second each way makes.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import deepspeed
from deepspeed.inference.generation.generator import Generator
from deepspeed.inference.scheduling.requests import SamplingParams


def byte_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def train_one(folder: Path, steps: int) -> None:
    """A Llama of 1 million parameters on the source of Python's standard library, saved with its tokenizer."""
    tokenizer = byte_tokenizer()
    source = "".join(path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")))
    text = torch.tensor(tokenizer(source, verbose=False).input_ids)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 128, (16,))
        batch = torch.stack([text[start : start + 128] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"trained a model on the standard library's source: loss {loss.item():.3f} nats per byte")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def generated(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[:, ids.shape[1] :]


def agreement(found: torch.Tensor, wanted: torch.Tensor) -> str:
    same = (found == wanted).float().cumprod(1).sum().int().item()
    return f"the first {same} of {wanted.numel()} tokens as Transformers"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder of save_pretrained; default: train a small one")
    parser.add_argument("--prompt", default="    def __init__(self", help="text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--requests", type=int, default=16, help="served together")
    parser.add_argument("--steps", type=int, default=300, help="of training, without --model")
    parser.add_argument(
        "--output", type=Path, default=None, help="where the trained model goes; default: nowhere"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))

    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model
        if folder is None:
            if ranks > 1:
                parser.error("several ranks need --model: train one with a single process and --output first")
            folder = (arguments.output or Path(scratch)) / "model"
            train_one(folder, arguments.steps)
        tokenizer = AutoTokenizer.from_pretrained(folder)

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

        ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids
        wanted = generated(load(), ids, arguments.tokens)

        engine = deepspeed.init_inference(load(), dtype="fp32", tensor_parallel={"tp_size": ranks})
        found = generated(engine, ids, arguments.tokens)
        if rank == 0:
            print(f"{arguments.prompt}{tokenizer.decode(found[0])}")
            print(f"init_inference on {ranks} rank(s): {agreement(found, wanted)}")
        if ranks > 1:
            return

        small = deepspeed.init_inference(load(), dtype="int8", replace_with_kernel_inject=True)
        print(f"int8 weights: {agreement(generated(small, ids, arguments.tokens), wanted)}")

        zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": scratch}}
        outside = deepspeed.init_inference(load(), dtype="fp32", zero=zero)
        told = agreement(generated(outside, ids, arguments.tokens), wanted)
        assert outside.streamed is not None
        held, whole = outside.streamed.bytes_held, outside.streamed.bytes_streamed
        print(f"weights in a file, {held / 1e6:.1f} of {whole / 1e6:.1f} MB in memory: {told}")

        prompts = [ids[0, : 4 + number % (ids.shape[1] - 3)].tolist() for number in range(arguments.requests)]
        alone = load()
        begin = time.perf_counter()
        one_by_one = [
            generated(alone, torch.tensor([prompt]), arguments.tokens)[0].tolist() for prompt in prompts
        ]
        seconds = time.perf_counter() - begin
        server = Generator(engine.module, max_length=ids.shape[1] + arguments.tokens + 1)
        begin = time.perf_counter()
        together = server.generate(prompts, SamplingParams(max_new_tokens=arguments.tokens))
        own = time.perf_counter() - begin
        same = sum(request.generated == wanted for request, wanted in zip(together, one_by_one, strict=True))
        made = arguments.requests * arguments.tokens
        print(
            f"{arguments.requests} requests: one by one {made / seconds:.0f} tokens/s, together {made / own:.0f}; "
            f"{same} with the same tokens"
        )


if __name__ == "__main__":
    main()

"""What the autotuner's benchmark trains: the GPT, with the micro-batch that its config says."""

from __future__ import annotations

import argparse

import torch

import deepspeed
from gpt import build, random_batches

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--size", default="10M")
parser.add_argument("--context", type=int, default=128)
parser.add_argument("--steps", type=int, default=12)
args = deepspeed.add_config_arguments(parser).parse_args()
model = build(args.size, args.context)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
size, gas = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
(batch,) = random_batches(1, size, args.context, seed=engine.global_rank)
for _ in range(args.steps * gas):
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
assert torch.isfinite(loss)

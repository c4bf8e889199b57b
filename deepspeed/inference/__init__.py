"""Inference over unchanged models: a paged KV cache, continuous batching, quantized weights, an HTTP server.

Start reading: `generation/generator.py`, `scheduling/scheduler.py`, `model/runner.py`, `serving/app.py`.
"""

"""The training engine: `initialize` -> `assembly` (builds every part in order) -> `engine` (forward, backward, step).

Observers subscribe to the engine's events (`observers/`); `hybrid_engine.py` and `rollout/` train and generate. Start
reading: `initialize.py`, `assembly.py`, `engine.py`.
"""

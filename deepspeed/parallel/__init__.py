"""Models split over ranks: `tensor/` layers, `sequence/` shards, `pipeline/` stages, `expert/` mixtures.

Each writes a placement on the parameters that it splits; the room `zero` reads it and knows nothing else of the split.
Start reading: `tensor/planning/planner.py`, `pipeline/stage_run.py`, `sequence/exchange.py`, `expert/dispatch.py`.
"""

"""Model parallelism: `tensor/`, `sequence/`, `pipeline/` and `expert/`.

Each sets a placement on the parameters that it splits; the room `zero` reads it and knows nothing else about the split.
Start reading: `tensor/planning/planner.py`, `pipeline/order_executor.py`, `sequence/exchange.py`, `expert/dispatch.py`.
"""

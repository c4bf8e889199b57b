"""Prediction of memory and step time before anything is allocated: bytes per rank by phase, place and kind
(docs/memory.md).

The planner runs the core's own code over simulated ranks and counted memory, so that a plan cannot drift from a run.
Start reading: `planner.py`, `rehearsal.py`, `step_time/step.py`.
"""

"""Measurement tools, independent of the engine: monitors, live record, flops profiler, timelines, audits, timers.

The engine's observers (`engine/observers`) feed them. Start reading: `monitor/monitor.py`, `flops/profiler.py`.
"""

"""Measuring without knowing an engine: monitors, the live record, the flops profiler, timelines, audits, timers.

The engine's observers (`engine/observers`) feed it. Start reading: `monitor/monitor.py`, `flops/profiler.py`.
"""

"""Command-line tools: launcher, config checks, plan, autotuner, elastic jobs, io, diff, live page, doctor.

`ds.py` lists the commands. Start reading: `launcher/runner.py`.
"""

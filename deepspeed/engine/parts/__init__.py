"""The parts of an engine: one for each use besides training.

``engine/surface.py`` lists their methods.
"""

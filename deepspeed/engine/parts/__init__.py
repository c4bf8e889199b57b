"""The parts that an engine owns: one for each thing that clients do with it beside training.

``engine/surface.py`` lists their methods.
"""

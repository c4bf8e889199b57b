"""Documented path of compressed collectives; the engine's own are in ``deepspeed.comm``."""

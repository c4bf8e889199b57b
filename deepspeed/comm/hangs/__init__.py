"""Diagnose hangs: what every rank was doing, and which one the others wait for."""

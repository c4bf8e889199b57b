"""Optimizers beyond the fused ones of `ops`: compressed (1-bit) ones, schedules, loss scaling, initial state.

Uses `comm` and below; knows nothing of ZeRO. Start reading: `lr_schedules.py`, `loss_scaler.py`, `one_bit.py`.
"""

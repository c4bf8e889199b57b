"""Integer weights of generating models: which layers get them, and calibration."""

"""Integer weights for generating models: layer selection and calibration."""

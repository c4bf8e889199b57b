"""Measuring storage: `ds_io` times one configuration, `ds_nvme_tune` looks for the best one."""

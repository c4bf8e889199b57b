"""Storage benchmarks: `ds_io` times one configuration, `ds_nvme_tune` searches for the best one."""

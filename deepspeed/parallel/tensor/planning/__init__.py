"""Planning of tensor parallelism: how to split each weight, derived from tracing one small forward on the meta
device."""

"""Number formats of few bits: encoding, decoding, packing. Whoever stores or sends such numbers takes them from here.

- `integers.py`: groups of integers with a scale, in fp32 arithmetic; `packing.py`: codes of 1 to 12 bits in bytes.
- `small_floats.py`: floating-point numbers of 4 to 12 bits with a scale per group (frozen weights).
- `blockwise.py`: 8-bit states of optimizers, by the block.
- `codecs.py`: quantized payloads for slow links, by the kernels that `host_codecs.py` calls.
- `linear.py`: products with frozen weights that are stored in any of these.
- `op_quantizer.py`: the documented op ``quantizer``.

Kernels that compute with such numbers directly are in `ops/small_product.py`, `ops/float8.py` and `ops/gpu`.
"""

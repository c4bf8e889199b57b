"""Low-bit number formats: encoding, decoding, packing. All code that stores or sends such numbers uses these.

- `integers.py`: groups of integers with a scale, in fp32 arithmetic; `packing.py`: codes of 1 to 12 bits in bytes.
- `small_floats.py`: floating-point numbers of 4 to 12 bits with a scale per group (frozen weights).
- `blockwise.py`: blockwise 8-bit optimizer states.
- `codecs.py`: quantized payloads for slow links, with the kernels that `host_codecs.py` calls.
- `linear.py`: products with frozen weights stored in any of these.
- `op_quantizer.py`: the documented op ``quantizer``.

Kernels that compute with such numbers directly are in `ops/small_product.py`, `ops/float8.py` and `ops/gpu`.
"""

"""Table of all documented ops: their names, modules, sources and kernels."""

from __future__ import annotations

from dataclasses import dataclass

KERNELS = "deepspeed.inference.v2.kernels"


@dataclass(frozen=True, slots=True)
class Op:
    """One op.

    ``module``: returned by ``load()``. None: the op is part of a larger feature here, which ``instead`` names.
    ``sources``: files in ``csrc/``. ``runs_on``: kinds of kernels: native ones on the host, Triton kernels on a GPU.
    Without a kernel, an op runs in PyTorch, unless ``fallback`` is False (then the module has ``is_available``, and
    ``needs`` names the requirement). ``on_host``: its tensors are in host memory, whatever the accelerator is.
    ``part``: what its kernels compute, if PyTorch computes the rest. ``switch``: name of the op in its build variable,
    if another one.
    """

    name: str
    builder: str
    absolute_name: str
    module: str | None = None
    sources: tuple[str, ...] = ()
    runs_on: tuple[str, ...] = ()
    on_host: bool = False
    part: str = ""
    fallback: bool = True
    needs: str = "the native library"
    instead: str = ""
    switch: str = ""

    @property
    def build_var(self) -> str:
        return f"DS_BUILD_{(self.switch or self.name).upper()}"


def _optimizer(name: str, builder: str, family: str, module: str = "", *, gpu: tuple[str, ...] = ()) -> Op:
    return Op(
        name,
        builder,
        f"deepspeed.ops.{family}.{name}_op",
        f"deepspeed.ops.{family}.{module or name}",
        sources=(f"csrc/{family}/{family}.cpp",),
        runs_on=("native", *gpu),
        on_host=name.startswith("cpu_"),
    )


_FASTGEN = "use deepspeed.inference.v2.engine_factory.build_hf_engine, whose engine selects its kernels"

OPS: tuple[Op, ...] = (
    _optimizer("cpu_adam", "CPUAdamBuilder", "adam"),
    _optimizer("cpu_adagrad", "CPUAdagradBuilder", "adagrad"),
    _optimizer("cpu_lion", "CPULionBuilder", "lion", "fused_lion"),
    _optimizer("fused_adam", "FusedAdamBuilder", "adam", gpu=("triton",)),
    _optimizer("fused_lamb", "FusedLambBuilder", "lamb"),
    _optimizer("fused_lion", "FusedLionBuilder", "lion"),
    Op("utils", "UtilsBuilder", "deepspeed.ops.utils_op", "deepspeed.ops.op_builder.flat_tensors"),
    Op(
        "deepspeed_shm_comm",
        "ShareMemCommBuilder",
        "deepspeed.ops.comm.deepspeed_shm_comm_op",
        "deepspeed.comm.transports.shared_memory",
        switch="shm_comm",
        sources=("csrc/comm/shared_memory.cpp", "csrc/comm/channel.cpp", "csrc/comm/combine.cpp"),
        runs_on=("native",),
        on_host=True,
        fallback=False,
        instead="collectives within a machine use gloo",
    ),
    Op(
        "async_io",
        "AsyncIOBuilder",
        "deepspeed.ops.aio.async_io_op",
        "deepspeed.ops.aio.async_io",
        switch="aio",
        sources=tuple(
            f"csrc/aio/{name}.cpp" for name in ("engine", "buffers", "file", "transport", "io_uring")
        ),
        runs_on=("native",),
        on_host=True,
    ),
    Op(
        "gds",
        "GDSBuilder",
        "deepspeed.ops.gds.gds_op",
        "deepspeed.ops.gds.gds",
        runs_on=("cuFile",),
        fallback=False,
        needs="an NVIDIA GPU and cuFile (GPUDirect Storage)",
        instead="use aio_handle, which takes GPU tensors too",
    ),
    Op(
        "pin_memory",
        "PinMemoryBuilder",
        "deepspeed.ops.pin_memory.pin_memory_op",
        "deepspeed.ops.aio.handle",
        on_host=True,
    ),
    Op(
        "deepspeed_ccl_comm",
        "CCLCommBuilder",
        "deepspeed.ops.comm.deepspeed_ccl_comm_op",
        switch="ccl_comm",
        instead="use the gloo backend, which uses shared memory between ranks of one machine",
    ),
    Op(
        "dc",
        "DeepCompileBuilder",
        "deepspeed.ops.dc_op",
        switch="deep_compile",
        instead="use engine.compile(), whose graph passes need no custom kernels",
    ),
    Op(
        "evoformer_attn",
        "EvoformerAttnBuilder",
        "deepspeed.ops.evoformer_attn_op",
        "deepspeed.ops.deepspeed4science.evoformer_attn",
        runs_on=("triton",),
    ),
    Op(
        "sparse_attn",
        "SparseAttnBuilder",
        "deepspeed.ops.sparse_attention.sparse_attn_op",
        "deepspeed.ops.sparse_attention",
        sources=("csrc/attention/sparse_attention.cpp",),
        runs_on=("native", "triton"),
    ),
    Op(
        "fp_quantizer",
        "FPQuantizerBuilder",
        "deepspeed.ops.fp_quantizer.fp_quantizer_op",
        "deepspeed.ops.fp_quantizer",
        sources=("csrc/codec/small_floats.cpp",),
        runs_on=("native", "triton"),
    ),
    Op(
        "quantizer",
        "QuantizerBuilder",
        "deepspeed.ops.quantizer.quantizer_op",
        "deepspeed.ops.formats.op_quantizer",
        sources=("csrc/codec/codecs.cpp",),
        runs_on=("native", "triton"),
        part="symmetric groups",
    ),
    Op(
        "random_ltd",
        "RandomLTDBuilder",
        "deepspeed.ops.random_ltd_op",
        "deepspeed.ops.random_ltd.dropping_utils",
    ),
    Op(
        "spatial_inference",
        "SpatialInferenceBuilder",
        "deepspeed.ops.spatial.spatial_inference_op",
        "deepspeed.ops.transformer.inference.bias_add",
    ),
    *(
        Op(
            name,
            builder,
            f"deepspeed.ops.transformer.{name}_op",
            "deepspeed.ops.transformer.transformer",
            sources=("csrc/transformer/dropout.cpp",),
            runs_on=("native", "triton"),
            part="dropout",
        )
        for name, builder in (
            ("transformer", "TransformerBuilder"),
            ("stochastic_transformer", "StochasticTransformerBuilder"),
        )
    ),
    Op(
        "transformer_inference",
        "InferenceBuilder",
        "deepspeed.ops.transformer.inference.transformer_inference_op",
        instead="use deepspeed.init_inference, whose engine selects its kernels",
    ),
    Op("inference_core_ops", "InferenceCoreBuilder", f"{KERNELS}.inference_core_ops", instead=_FASTGEN),
    Op(
        "cutlass_ops",
        "InferenceCutlassBuilder",
        f"{KERNELS}.cutlass_ops",
        instead="use deepspeed.ops.triton_ops.group_gemm_triton for grouped expert GEMMs, and FP_Quantize for "
        "small floats",
    ),
    Op("ragged_device_ops", "RaggedOpsBuilder", f"{KERNELS}.ragged_ops.ragged_device_ops", instead=_FASTGEN),
    Op("ragged_ops", "RaggedUtilsBuilder", "deepspeed.inference.v2.ragged_ops", instead=_FASTGEN),
)

"""All documented ops: their names, where each one is implemented, and what runs it."""

from __future__ import annotations

from dataclasses import dataclass

KERNELS = "deepspeed.inference.v2.kernels"


@dataclass(frozen=True, slots=True)
class Op:
    """One op.

    ``module`` is what ``load()`` returns. None: what the op does is part of something larger here, and ``instead``
    says of what. ``sources`` are files in ``csrc/``. ``runs_on`` are the kinds of kernel that the op has: native ones
    for the host, Triton's for a GPU. Where it has none it runs in PyTorch, unless ``fallback`` is False (then the
    module has ``is_available``, and ``needs`` says what that depends on). ``on_host``: its tensors are in host memory,
    whatever the accelerator is. ``part``: what its kernels compute, if PyTorch computes the rest.
    """

    name: str
    builder: str
    build_var: str
    absolute_name: str
    module: str | None = None
    sources: tuple[str, ...] = ()
    runs_on: tuple[str, ...] = ()
    on_host: bool = False
    part: str = ""
    fallback: bool = True
    needs: str = "the native library"
    instead: str = ""


def _optimizer(name: str, builder: str, family: str, source: str, *, gpu: tuple[str, ...] = ()) -> Op:
    return Op(
        name=name,
        builder=builder,
        build_var=f"DS_BUILD_{name.upper()}",
        absolute_name=f"deepspeed.ops.{family}.{name}_op",
        module=f"deepspeed.ops.{family}.{name}",
        sources=(source,),
        runs_on=("native", *gpu),
        on_host=name.startswith("cpu_"),
    )


def _elsewhere(name: str, builder: str, absolute_name: str, instead: str, build_var: str = "") -> Op:
    return Op(name, builder, build_var or f"DS_BUILD_{name.upper()}", absolute_name, instead=instead)


_INIT_INFERENCE = "use deepspeed.init_inference, whose engine chooses its kernels itself"
_FASTGEN = (
    "use deepspeed.inference.v2.engine_factory.build_hf_engine, whose engine chooses its kernels itself"
)

OPS: tuple[Op, ...] = (
    _optimizer("cpu_adam", "CPUAdamBuilder", "adam", "csrc/adam/adam.cpp"),
    _optimizer("cpu_adagrad", "CPUAdagradBuilder", "adagrad", "csrc/adagrad/adagrad.cpp"),
    _optimizer("cpu_lion", "CPULionBuilder", "lion", "csrc/lion/lion.cpp"),
    _optimizer("fused_adam", "FusedAdamBuilder", "adam", "csrc/adam/adam.cpp", gpu=("triton",)),
    _optimizer("fused_lamb", "FusedLambBuilder", "lamb", "csrc/lamb/lamb.cpp"),
    _optimizer("fused_lion", "FusedLionBuilder", "lion", "csrc/lion/lion.cpp"),
    Op(
        name="utils",
        builder="UtilsBuilder",
        build_var="DS_BUILD_UTILS",
        absolute_name="deepspeed.ops.utils_op",
        module="deepspeed.ops.op_builder.flat_tensors",
    ),
    Op(
        name="deepspeed_shm_comm",
        builder="ShareMemCommBuilder",
        build_var="DS_BUILD_SHM_COMM",
        absolute_name="deepspeed.ops.comm.deepspeed_shm_comm_op",
        module="deepspeed.comm.transports.shared_memory",
        sources=("csrc/comm/shared_memory.cpp", "csrc/comm/channel.cpp", "csrc/comm/combine.cpp"),
        runs_on=("native",),
        on_host=True,
        fallback=False,
        instead="collectives inside a machine go through gloo",
    ),
    Op(
        name="async_io",
        builder="AsyncIOBuilder",
        build_var="DS_BUILD_AIO",
        absolute_name="deepspeed.ops.aio.async_io_op",
        module="deepspeed.ops.aio.async_io",
        sources=tuple(
            f"csrc/aio/{name}.cpp" for name in ("engine", "buffers", "file", "transport", "io_uring")
        ),
        runs_on=("native",),
        on_host=True,
    ),
    Op(
        name="gds",
        builder="GDSBuilder",
        build_var="DS_BUILD_GDS",
        absolute_name="deepspeed.ops.gds.gds_op",
        module="deepspeed.ops.gds.gds",
        runs_on=("cuFile",),
        fallback=False,
        needs="an NVIDIA GPU and cuFile (GPUDirect Storage)",
        instead="use aio_handle, which takes GPU tensors too",
    ),
    Op(
        name="pin_memory",
        builder="PinMemoryBuilder",
        build_var="DS_BUILD_PIN_MEMORY",
        absolute_name="deepspeed.ops.pin_memory.pin_memory_op",
        module="deepspeed.ops.aio.pin_memory",
        on_host=True,
    ),
    _elsewhere(
        "deepspeed_ccl_comm",
        "CCLCommBuilder",
        "deepspeed.ops.comm.deepspeed_ccl_comm_op",
        "use the gloo backend, beside which ranks of one machine communicate through shared memory",
        "DS_BUILD_CCL_COMM",
    ),
    _elsewhere(
        "dc",
        "DeepCompileBuilder",
        "deepspeed.ops.dc_op",
        "use engine.compile(), whose passes over graphs need no kernels of their own",
        "DS_BUILD_DEEP_COMPILE",
    ),
    Op(
        name="evoformer_attn",
        builder="EvoformerAttnBuilder",
        build_var="DS_BUILD_EVOFORMER_ATTN",
        absolute_name="deepspeed.ops.evoformer_attn_op",
        module="deepspeed.ops.deepspeed4science.evoformer_attn",
        runs_on=("triton",),
    ),
    Op(
        name="sparse_attn",
        builder="SparseAttnBuilder",
        build_var="DS_BUILD_SPARSE_ATTN",
        absolute_name="deepspeed.ops.sparse_attention.sparse_attn_op",
        module="deepspeed.ops.sparse_attention",
        sources=("csrc/attention/sparse_attention.cpp",),
        runs_on=("native", "triton"),
    ),
    Op(
        name="fp_quantizer",
        builder="FPQuantizerBuilder",
        build_var="DS_BUILD_FP_QUANTIZER",
        absolute_name="deepspeed.ops.fp_quantizer.fp_quantizer_op",
        module="deepspeed.ops.fp_quantizer",
        sources=("csrc/codec/small_floats.cpp",),
        runs_on=("native", "triton"),
    ),
    Op(
        name="quantizer",
        builder="QuantizerBuilder",
        build_var="DS_BUILD_QUANTIZER",
        absolute_name="deepspeed.ops.quantizer.quantizer_op",
        module="deepspeed.ops.formats.op_quantizer",
        sources=("csrc/codec/codecs.cpp",),
        runs_on=("native", "triton"),
        part="symmetric groups",
    ),
    Op(
        name="random_ltd",
        builder="RandomLTDBuilder",
        build_var="DS_BUILD_RANDOM_LTD",
        absolute_name="deepspeed.ops.random_ltd_op",
        module="deepspeed.ops.random_ltd.dropping_utils",
    ),
    Op(
        name="spatial_inference",
        builder="SpatialInferenceBuilder",
        build_var="DS_BUILD_SPATIAL_INFERENCE",
        absolute_name="deepspeed.ops.spatial.spatial_inference_op",
        module="deepspeed.ops.transformer.inference.bias_add",
    ),
    Op(
        name="transformer",
        builder="TransformerBuilder",
        build_var="DS_BUILD_TRANSFORMER",
        absolute_name="deepspeed.ops.transformer.transformer_op",
        module="deepspeed.ops.transformer.transformer",
        sources=("csrc/transformer/dropout.cpp",),
        runs_on=("native", "triton"),
        part="dropout",
    ),
    Op(
        name="stochastic_transformer",
        builder="StochasticTransformerBuilder",
        build_var="DS_BUILD_STOCHASTIC_TRANSFORMER",
        absolute_name="deepspeed.ops.transformer.stochastic_transformer_op",
        module="deepspeed.ops.transformer.transformer",
        sources=("csrc/transformer/dropout.cpp",),
        runs_on=("native", "triton"),
        part="dropout",
    ),
    _elsewhere(
        "transformer_inference",
        "InferenceBuilder",
        "deepspeed.ops.transformer.inference.transformer_inference_op",
        _INIT_INFERENCE,
    ),
    _elsewhere("inference_core_ops", "InferenceCoreBuilder", f"{KERNELS}.inference_core_ops", _FASTGEN),
    _elsewhere(
        "cutlass_ops",
        "InferenceCutlassBuilder",
        f"{KERNELS}.cutlass_ops",
        "use deepspeed.ops.triton_ops.group_gemm_triton for products of experts, and FP_Quantize for small floats",
    ),
    _elsewhere("ragged_device_ops", "RaggedOpsBuilder", f"{KERNELS}.ragged_ops.ragged_device_ops", _FASTGEN),
    _elsewhere("ragged_ops", "RaggedUtilsBuilder", "deepspeed.inference.v2.ragged_ops", _FASTGEN),
)

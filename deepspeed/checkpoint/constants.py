"""Keys of checkpoint files and parts of their names, each under its documented constant.

The script `zero_to_fp32.py` that release 0.19 puts into its checkpoints imports some of these.
"""

from deepspeed.checkpoint import names

DS_CONFIG, DS_VERSION = names.DS_CONFIG, names.DS_VERSION

# Files
MODEL_FILE_PREFIX = "mp_rank_"
ZERO_FILE_PREFIX = "zero_pp_rank_"
BF16_ZERO_FILE_PREFIX = f"bf16_{ZERO_FILE_PREFIX}"
FP16_ZERO_FILE_PREFIX = f"fp16_{ZERO_FILE_PREFIX}"
LAYER_FILE_PREFIX = "layer_"

# Keys of the optimizer file
OPTIMIZER_STATE_DICT = names.OPTIMIZER_STATE
FP32_FLAT_GROUPS = "fp32_flat_groups"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
BASE_OPTIMIZER_STATE_STEP = f"{BASE_OPTIMIZER_STATE}_step"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
PARAM_GROUPS = "param_groups"
GROUP_PADDINGS = "group_paddings"
PARTITION_COUNT = "partition_count"
ZERO_STAGE = "zero_stage"
CLIP_GRAD = "clip_grad"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
LOSS_SCALER = "loss_scaler"

# Keys of the model file
PARAM = "param"
PARAM_SHAPES = "param_shapes"
BUFFER_NAMES = "buffer_names"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"

CHECKPOINT_PARALLEL_DIMS = "checkpoint_parallel_dimensions"
CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE = "pp_degree", "tp_degree"

# Universal checkpoints
FP32_WEIGHT_KEY = "fp32"
CAT_DIM = "cat_dim"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
VOCAB_TENSOR = "vocab_tensor"
PADDED_VOCAB_SIZE, ORIGINAL_VOCAB_SIZE = "padded_vocab_size", "original_vocab_size"
PARAM_N_SUB_PARAMS = "param_n_sub_params"
SUB_PARAM_SHAPE, SUB_PARAM_SHARD_WIDTHS = "sub_param_shape", "sub_param_shard_widths"

# A model's description of its parameters: regular expressions that match their names
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"

# Cuts of parameters, as tensor-parallel layers of release 0.19 record them
DS_AUTOTP_UC_META = "ds_autotp_universal_checkpoint_meta"
AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS = "autotp_unsupported_parameter_patterns"

# Expert parallelism
EP_IS_EXPERT_PARAM = "is_expert_param"
EP_NUM_EXPERTS = "ep_num_experts"
AUTOEP_LAYERS_KEY = "ds_autoep_layers"
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY = "checkpoint_format"
AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT = "zero3_partitioned"
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY = f"{AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY}_version"
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION = 1

# Expert parallelism folded with tensor parallelism
FOLDING_METADATA_KEY = "folding"
FOLDING_TP_SIZE, FOLDING_TP_RANK = "tp_size", "tp_rank"
FOLDING_EP_SIZE, FOLDING_EP_RANK = "ep_size", "ep_rank"
FOLDING_ETP_SIZE, FOLDING_ETP_RANK = "etp_size", "etp_rank"
FOLDING_ZERO_PARTITION_GROUP, FOLDING_ZERO_PARTITION_COUNT = "zero_partition_group", "zero_partition_count"
FOLDING_DISPATCH_STRATEGY = "dispatch_strategy"
FOLDING_SHARED_EXPERT_PLACEMENT = "shared_expert_placement"
FOLDING_FAMILY, FOLDING_PARAM_FAMILIES = "family", "param_families"

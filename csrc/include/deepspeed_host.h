/* Host kernels of deepspeed: one plain C interface, no torch headers, called through ctypes.
 *
 * Common rules
 *  - Arithmetic is fp32 per element (sums: fp64), whatever the storage type; a value is rounded once, to nearest even,
 *    when it is stored.
 *  - No bit of a result depends on instruction set, alignment, thread count, or where a tensor is cut: there are no fused
 *    multiply-adds (-ffp-contract=off) and no reassociated sums.
 *  - `threads` is an upper bound; small inputs are done by the calling thread alone.
 *  - Tensors are contiguous. Nothing here allocates memory that outlives the call, raises or aborts.
 */
#ifndef DEEPSPEED_HOST_H
#define DEEPSPEED_HOST_H

#include <stdint.h>

#if defined(_WIN32)
#define DS_API __declspec(dllexport)
#else
#define DS_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Increased whenever a signature or a struct below changes; deepspeed/ops/native.py refuses any other number. */
#define DS_HOST_ABI 4
DS_API int32_t ds_abi(void);

enum ds_dtype { DS_FLOAT32 = 0, DS_BFLOAT16 = 1, DS_FLOAT16 = 2 };

/* Instruction set in use: 0 plain, 1 AVX2, 2 AVX-512. The best the machine has, or what DS_NATIVE_ISA names
 * (plain, avx2, avx512) if the machine has it. */
DS_API int32_t ds_isa(void);
/* Choose a set (for tests and measurements); returns the one now in use, unchanged if the machine lacks `isa`. */
DS_API int32_t ds_set_isa(int32_t isa);

/* One tensor, or one fragment of a tensor, of an optimizer step. Unused pointers are null. */
typedef struct ds_segment {
    void *param;         /* updated in place */
    const void *grad;
    void *state1;        /* Adam, LAMB, Lion: exp_avg; SGD: momentum_buffer; Adagrad: sum */
    void *state2;        /* Adam, LAMB: exp_avg_sq */
    void *low_precision; /* if not null: the new parameter, rounded to `low_dtype` */
    float *step;         /* number of updates so far, one float; the step functions below increase it */
    int64_t numel;
} ds_segment;

/* Storage types (enum ds_dtype) of all segments of one call. */
typedef struct ds_storage {
    int32_t param, grad, state, low_precision;
} ds_storage;

/* Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019: `decoupled` weight decay). */
DS_API void ds_adam(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double beta1,
                    double beta2, double eps, double weight_decay, double grad_scale, int32_t bias_correction,
                    int32_t decoupled, int32_t threads);

/* momentum = beta * momentum + (1 - beta) * (grad_scale * grad), for gradients of `dtype`. */
DS_API void ds_follow_momentum(float *momentum, const void *grad, int32_t dtype, int64_t numel, double grad_scale,
                               double beta, int32_t threads);

/* One fp32 tensor, updated by a momentum over the root of a variance that stays. */
typedef struct ds_frozen_update {
    float *param;
    const float *momentum, *variance;
    float *agreed, *local; /* null, or: `agreed` decays, `local` sums up what updates take away, `param` is the rest */
    void *low_precision;   /* null, or where `param` goes, rounded to `dtype` */
    int64_t numel;
    int32_t dtype;
    int32_t keeps_param; /* with `local`: `param` is left for later */
} ds_frozen_update;

/* param = decay * param - rate * momentum / (sqrt(variance / variance_correction) + eps). */
DS_API void ds_frozen_step(const ds_frozen_update *update, double variance_correction, double eps, double rate,
                           double decay, int32_t threads);

/* One tensor, or a part of it from a multiple of 256 elements on, of a step with moments in 8 bits. */
typedef struct ds_compact_segment {
    void *param; /* updated in place */
    const void *grad;
    void *state1, *state2;  /* exp_avg and exp_avg_sq: fp32, or codes */
    float *scale1, *scale2; /* of codes: one per 256 elements */
    void *low_precision;    /* as in ds_segment */
    float *step;
    int64_t numel;
    int64_t start; /* index of the first element in its parameter: random bits depend on it */
} ds_compact_segment;

enum ds_state_codes { DS_CODES8 = 3 }; /* ds_storage.state of moments in 8 bits */

/* Adam or AdamW; `stochastic`: parameters in bfloat16 are rounded at random, in proportion. */
DS_API void ds_compact_adam(const ds_compact_segment *segments, int64_t count, const ds_storage *storage, double lr,
                            double beta1, double beta2, double eps, double weight_decay, double grad_scale,
                            int32_t bias_correction, int32_t decoupled, int32_t stochastic, int32_t threads);

/* Lion (Chen et al., 2023), decoupled weight decay. */
DS_API void ds_lion(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double beta1,
                    double beta2, double weight_decay, double grad_scale, int32_t threads);

/* Adagrad (Duchi et al., 2011) as torch.optim.Adagrad has it (lr_decay included). */
DS_API void ds_adagrad(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double lr_decay,
                       double eps, double weight_decay, double grad_scale, int32_t threads);

/* SGD as torch.optim.SGD has it. `state1` is null where momentum is 0. The first update (step == 0) copies the gradient
 * into the momentum. */
DS_API void ds_sgd(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double momentum,
                   double dampening, double weight_decay, double grad_scale, int32_t nesterov, int32_t threads);

/* LAMB (You et al., 2020) in two passes. The first updates the moments and writes, per segment, the sums of squares of
 * the parameter and of the update to sums[2 * i], sums[2 * i + 1] (fp64). The second applies the update, scaled by the
 * caller's trust_ratio[i]. Both form it from the moments as they are stored. */
DS_API void ds_lamb_moments(const ds_segment *segments, int64_t count, const ds_storage *storage, double beta1,
                            double beta2, double eps, double weight_decay, double grad_scale, int32_t bias_correction,
                            int32_t eps_inside_sqrt, double *sums, int32_t threads);
DS_API void ds_lamb_apply(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double beta1,
                          double beta2, double eps, double weight_decay, int32_t bias_correction,
                          int32_t eps_inside_sqrt, const double *trust_ratio, int32_t threads);

typedef struct ds_span {
    const void *data;
    int64_t numel;
    int64_t dtype;
} ds_span;

/* Sum of squares of each span, fp64, to sums[i]; the sum of all of them, in order, is returned. Not finite exactly if
 * some element is not finite. */
DS_API double ds_sum_of_squares(const ds_span *spans, int64_t count, double *sums, int32_t threads);

typedef struct ds_copy {
    void *output;
    const void *input;
    int64_t numel;
    int32_t output_dtype, input_dtype;
} ds_copy;

/* output = input * scale, converted, for each entry; an output may be its own input. */
DS_API void ds_scale_copy(const ds_copy *copies, int64_t count, double scale, int32_t threads);

typedef struct ds_bytes {
    void *target;
    const void *source;
    int64_t bytes;
} ds_bytes;

/* Copies each entry; much at once goes past the cache. */
DS_API void ds_copy_bytes(const ds_bytes *copies, int64_t count, int32_t threads);

/* output = (inputs[0] + inputs[1] + ...) * scale: summed in this order in fp32, rounded once. The output may be one of
 * the inputs. */
DS_API void ds_reduce_chunks(void *output, int32_t output_dtype, const void *const *inputs, int64_t count,
                             int32_t input_dtype, int64_t numel, double scale, int32_t threads);

/* What stands for an element: its sign (scales are means of magnitudes), an integer, or an e4m3 number. The lower byte is
 * the number of bits. */
enum ds_codes { DS_SIGNS = 1, DS_INTEGERS4 = 4, DS_INTEGERS8 = 8, DS_FLOATS8 = 256 + 8 };

/* Which neighbour a number between two codes becomes: the nearest, or one at random, right in the mean (only integers). */
enum ds_rounding { DS_NEAREST = 0, DS_RANDOM = 1 };

/* Payloads [rows, stride] of rows of `numel` elements: fp32 scales of all blocks of a row, then its codes, then zeros. */
typedef struct ds_payloads {
    uint8_t *data;
    int64_t rows, stride; /* bytes */
    int64_t numel, block; /* elements of a row, and of those with one scale: an even number, for signs a multiple of 8 */
    int32_t codes;        /* enum ds_codes */
    int32_t rounding;     /* enum ds_rounding; random bits are a hash of the block, its number and the seed */
    uint32_t seed;
} ds_payloads;

/* Encodes values [rows, numel] of `dtype`. `errors`, if not null, [rows, numel], are added first, and become what
 * encoding took away. */
DS_API void ds_encode(const ds_payloads *payloads, const void *values, int32_t dtype, float *errors, int32_t threads);
/* Decodes to values [rows, numel] of `dtype`; with `sum` to values [numel], the sum of all rows in their order. */
DS_API void ds_decode(const ds_payloads *payloads, void *values, int32_t dtype, int32_t sum, int32_t threads);

/* Groups of `group` small floating-point numbers (whole bytes; with 6 and 12 bits a multiple of 4), each with a scale in
 * fp32 at any address. */
typedef struct ds_float_groups {
    uint8_t *codes, *scales;
    int64_t stride, scale_stride; /* bytes from group to group */
    int64_t numel, group;         /* the last group may have fewer numbers: it is filled up with zeros */
    int32_t bits;                 /* 4: E2M1, 6: E3M2, 8: E4M3, 12: E7M4 */
} ds_float_groups;

/* Encodes `values` [numel] of `dtype`; not 0 if one of them is not finite, the codes are then of no use. */
DS_API int32_t ds_encode_floats(const ds_float_groups *groups, const void *values, int32_t dtype, int32_t threads);
DS_API void ds_decode_floats(const ds_float_groups *groups, void *values, int32_t dtype, int32_t threads);

/* Payloads [rows, 2 * count] of the `count` elements with the largest magnitudes of each row of `numel` (of equal ones the
 * first; a NaN is larger than all numbers): their fp32 values in the order of their places, then their int32 places.
 * `errors` as above. Returns 0, and does nothing, where there is no memory for it. */
DS_API int32_t ds_encode_largest(void *payloads, int64_t rows, int64_t numel, int64_t count, const void *values,
                                 int32_t dtype, float *errors, int32_t threads);
/* To values [rows, numel], zero where there is none; with `sum` to values [numel], the sum of all rows in their order. */
DS_API void ds_decode_largest(const void *payloads, int64_t rows, int64_t numel, int64_t count, float *values, int32_t sum,
                              int32_t threads);

/* CRC-32 of each block of `block` bytes (the last may be shorter) to crcs. Returns 0, and does nothing, where the machine
 * has no instruction for it. */
DS_API int32_t ds_crc32_blocks(const void *data, int64_t bytes, int64_t block, uint32_t *crcs);

/* How a matrix [outputs, columns] is stored. Integers lie in runs of 64 (8 bits) or 128 columns (4 bits), the last padded
 * with zeros: number n of word i of a run is its column 16 n + i. */
enum ds_weights { DS_WEIGHTS_BFLOAT16 = 0, DS_WEIGHTS_INT8 = 1, DS_WEIGHTS_INT4 = 2, DS_WEIGHTS_FLOAT32 = 3 };

typedef struct ds_matrix {
    const void *values;
    const float *scales; /* of integers: [outputs, padded columns / group] */
    const void *bias;    /* [outputs], or null */
    int64_t outputs;
    int64_t row_bytes;
    int64_t group;      /* of integers: columns with one scale, runs that divide the padded columns */
    int32_t bias_dtype;
} ds_matrix;

/* output [rows, outputs of all matrices] = input [rows, columns] times the transposes of the matrices, plus their biases.
 * Inputs are rounded to bfloat16 for matrices of bfloat16, and to integers of 15 bits with a scale for each row for
 * integers. The rows beside a row do not change its bits. */
typedef struct ds_product {
    void *output;
    const void *input;
    const ds_matrix *matrices;
    int64_t count;                       /* of matrices */
    int64_t columns;
    int64_t input_stride, output_stride; /* elements of a row */
    int32_t weights;                     /* enum ds_weights, of all matrices */
    int32_t input_dtype, output_dtype;
} ds_product;

/* Rows of a table of embeddings. */
typedef struct ds_embedding {
    void *output; /* [rows, size], fp32 */
    const void *table;
    int64_t size;
    int32_t table_dtype;
} ds_embedding;

/* sum = stream + delta, where there is one; output = its rows (without a delta the stream's) normalised by their root mean square, or (centered) by
 * mean and deviation, times (weight + offset), plus bias. */
typedef struct ds_norm {
    const void *stream; /* [.., size] */
    const void *delta;  /* or null */
    void *sum;          /* may be the stream; that it is another spares threads a meeting */
    void *output;
    const void *weight, *bias; /* [size]; either may be null */
    int64_t size;
    float eps, offset;
    int32_t centered;
    int32_t dtype; /* of stream, delta, sum and output */
    int32_t weight_dtype;
} ds_norm;

/* Rows of queries, keys and values beside each other. Queries and keys of each head are normalised by their root mean
 * square, where weights for it are given, and rotated; keys and values go to the pages of the step's pieces. */
typedef struct ds_rotary {
    void *projected; /* [rows, heads * key_size + kv_heads * (key_size + value_size)]; rotated in place */
    void *keys, *values; /* the cache, as in ds_paged_layer; null: nothing is stored */
    const float *cosines, *sines; /* [positions, rotary / 2] */
    const void *query_weight, *key_weight; /* [key_size], or null */
    int64_t heads, kv_heads, key_size, value_size, block_size;
    int64_t rotary;      /* numbers of a head that are rotated, from its first */
    int32_t interleaved; /* pairs lie beside each other, else in two halves */
    float eps;
    int32_t dtype, cache_dtype, weight_dtype;
} ds_rotary;

enum ds_activation {
    DS_SILU = 0,
    DS_GELU = 1,      /* by the error function */
    DS_GELU_TANH = 2,
    DS_RELU = 3
};

/* The place of the largest number of each row, the first of equals. */
typedef struct ds_largest {
    int64_t *output; /* [rows] */
    const void *input;
    int64_t size;
    int64_t input_stride; /* elements of a row */
    int32_t dtype;
} ds_largest;

/* output = activation(gate) * up, or without `up` (null) the activation alone. */
typedef struct ds_gate {
    void *output;
    const void *gate, *up;
    int64_t size;
    int64_t input_stride, output_stride; /* elements of a row */
    int32_t activation;                  /* enum ds_activation */
    int32_t dtype;
} ds_gate;

/* Tokens of one sequence in one forward. */
typedef struct ds_paged_piece {
    const int64_t *blocks; /* of the sequence, in its order */
    int64_t start;         /* position of its first token here */
    int64_t count;         /* tokens */
    int64_t row;           /* of its first token among the tokens of the forward */
    int32_t writes;        /* the tokens' keys and values go to the cache first */
    int32_t attends;       /* then their attention is computed */
} ds_paged_piece;

/* One layer. Tensors of the forward's tokens have strides (in elements) for heads and tokens; a head's numbers lie side
 * by side. All but `sinks` are of `dtype`, queries and output of `query_dtype`. */
typedef struct ds_paged_layer {
    void *keys, *values; /* the cache: [blocks, kv_heads, key_size, block_size], [.., block_size, value_size] */
    const void *query, *new_keys, *new_values;
    void *output;        /* [tokens, heads, value_size] */
    const float *sinks;  /* [heads]: scores without a value in each softmax, or null */
    int64_t heads, kv_heads, block_size, key_size, value_size;
    int64_t query_head_stride, query_token_stride, key_head_stride, key_token_stride, value_head_stride,
        value_token_stride;
    int64_t window; /* a token sees itself and the window - 1 before it; 0: all before it */
    float scale, softcap; /* scores s become softcap * tanh(s / softcap); 0: they do not */
    int32_t dtype, query_dtype;
} ds_paged_layer;

/* Causal attention of each piece over its own sequence. */
DS_API void ds_paged_attention(const ds_paged_layer *layer, const ds_paged_piece *pieces, int64_t count,
                               int32_t threads);

/* output = input without dropped elements, times scale, plus the residual if there is one. An element is dropped if a hash
 * of its index and the seed is below `limit`. */
typedef struct ds_dropout_call {
    void *output;
    const void *input, *residual;
    int64_t numel;
    uint64_t seed;
    uint32_t limit; /* of 2^32 */
    float scale;
    int32_t dtype;
} ds_dropout_call;

DS_API void ds_dropout(const ds_dropout_call *call, int32_t threads);

/* Self-attention of [batch, heads, tokens, size] (contiguous, of `dtype`) in the blocks of a layout. */
typedef struct ds_sparse_attention {
    const void *query, *key, *value;
    void *output;
    float *lse; /* [batch, heads, tokens]: of the scaled scores; -inf where a token sees nothing */
    /* Layouts: row r of layout x sees blocks columns[starts[x * (rows + 1) + r]] to the next start, in rising order. */
    const int64_t *starts;
    const int32_t *columns;
    const int64_t *layout_of; /* [heads] */
    const float *key_bias;    /* [batch, tokens], added to the scores, or null */
    const float *score_bias;  /* [tokens, tokens], or null */
    /* Of backward. */
    const void *grad_output;
    void *grad_query, *grad_key, *grad_value;
    /* Scratch: of several parts [parts, batch, heads, tokens, size]; of one [threads, tokens, size], none in fp32. */
    float *key_sums, *value_sums;
    int64_t batch, heads, tokens, size; /* size: a multiple of 16 */
    int64_t block;                      /* tokens, a multiple of 16 */
    int64_t parts; /* ranges of rows of one head whose sums for keys and values are made apart, then added */
    float scale;
    int32_t dtype;
    int32_t causal;
} ds_sparse_attention;

/* Both return 0, and do nothing, where they are not available. */
DS_API int32_t ds_sparse_attention_forward(const ds_sparse_attention *call, int32_t threads);
DS_API int32_t ds_sparse_attention_backward(const ds_sparse_attention *call, int32_t threads);

/* c = a b + bias, all of fp32. a(m, k) is a[m * a_row + k * a_step], b(k, n) is b[k * b_step + n * b_column]. */
typedef struct ds_matrix_product {
    const float *a, *b;
    const float *bias; /* [columns], or null */
    float *c;          /* rows of consecutive columns, c_row apart */
    int64_t rows, columns, depth;
    int64_t a_row, a_step, b_step, b_column, c_row;
} ds_matrix_product;

/* Whether this is a processor that adds beside multiplying, at a width of which MKL uses the half. */
DS_API int32_t ds_matrix_product_is_fast(void);

/* Returns 0, and does nothing, where it is not available. */
DS_API int32_t ds_matrix_product_run(const ds_matrix_product *call, int32_t threads);

enum ds_kind {
    DS_EMBEDDING = 0,
    DS_NORM = 1,
    DS_PRODUCT = 2,
    DS_ROTARY = 3,
    DS_ATTENTION = 4, /* ds_paged_layer; keys and values of the pieces are stored already */
    DS_GATE = 5,
    DS_LARGEST = 6
};

/* An operation on all rows of a step, or (on_last) on its rows `last`. A norm on these takes them from among all rows of
 * its stream; the output of every operation on them has their number of rows. */
typedef struct ds_operation {
    const void *arguments; /* the struct of its kind */
    int32_t kind;          /* enum ds_kind */
    int32_t on_last;
} ds_operation;

/* The tokens of a forward: those of its pieces, one after another. */
typedef struct ds_step {
    int64_t rows;
    const int64_t *tokens;    /* [rows], for embeddings */
    const int64_t *positions; /* [rows], for rotations */
    const int64_t *last;      /* [count]: the rows after which results are wanted */
    const ds_paged_piece *pieces; /* [piece_count] */
    int64_t count, piece_count;
} ds_step;

/* One operation after another, each by all threads. */
DS_API void ds_run(const ds_operation *operations, int64_t count, const ds_step *step, int32_t threads);

#ifdef __cplusplus
}
#endif
#endif

/* Collectives of CPU tensors among processes of one host, through shared memory: the C interface that
 * deepspeed/comm/transports/shared_memory.py calls.
 *
 * A channel connects the ranks of one process group. Every rank issues the same operations in the same order; each
 * moves its data in rounds through small slots (see channel.h), so memory is bounded whatever the size of a tensor.
 *
 * Sums are taken in rank order: fp32 for fp32, bf16 and fp16 inputs, fp64 and integers as they are; times `scale`,
 * rounded once. No bit depends on timing or on how a tensor is cut.
 */
#ifndef DEEPSPEED_SHARED_MEMORY_H
#define DEEPSPEED_SHARED_MEMORY_H

#include "deepspeed_host.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DS_SHM_ABI 3
DS_API int32_t ds_shm_abi(void);

/* Continues enum ds_dtype. */
enum ds_shm_dtype {
    DS_FLOAT64 = 3,
    DS_INT8 = 4,
    DS_UINT8 = 5,
    DS_INT16 = 6,
    DS_INT32 = 7,
    DS_INT64 = 8
};

enum ds_shm_kind {
    DS_SHM_ALL_GATHER = 0,     /* output[size * bytes] = everyone's input[bytes] */
    DS_SHM_REDUCE_SCATTER = 1, /* output[numel] = slice `rank` of the sum of input[size * numel] */
    DS_SHM_ALL_REDUCE = 2,     /* output[numel] = the sum of input[numel]; output == input */
    DS_SHM_ALL_REDUCE_MAX = 3, /* likewise, the maximum (NaN if one is NaN) */
    DS_SHM_BROADCAST = 4,      /* output[bytes] of everyone = that of `root` */
    DS_SHM_ALL_TO_ALL = 5,     /* input in runs of input_bytes[p] for rank p, output in runs of output_bytes[p] */
    DS_SHM_REDUCE = 6,         /* output[numel] on `root` = the sum of input[numel] */
    DS_SHM_BARRIER = 7
};

/* What all ranks have to agree on. */
typedef struct ds_shm_call {
    int64_t count; /* elements of reductions, bytes of the rest, as the comments above name them; all_to_all: 0 */
    int32_t kind, input_dtype, output_dtype, root;
} ds_shm_call;

typedef struct ds_shm_operation {
    void *output;
    const void *input;
    const int64_t *output_bytes, *input_bytes; /* all_to_all; have to live until the operation is done */
    double scale;
    ds_shm_call call;
} ds_shm_operation;

enum ds_shm_status {
    DS_SHM_OK = 0,
    DS_SHM_PENDING = 1,
    DS_SHM_TIMEOUT = 2, /* the silent rank did not come within the timeout */
    DS_SHM_DEAD = 3,    /* the process of the silent rank is gone */
    DS_SHM_LEFT = 4,    /* the silent rank closed its channel */
    DS_SHM_CLOSED = 5,  /* this channel was closed */
    DS_SHM_MISMATCH = 6 /* the silent rank is in another operation than this one */
};

typedef struct ds_shm_channel ds_shm_channel;

/* Rank 0: make anonymous shared memory for `size` ranks, marked with `token`. Returns its file descriptor, to be
 * opened by the others as /proc/<pid>/fd/<fd> and closed here once they have; or -errno. */
DS_API int32_t ds_shm_create(int32_t size, uint64_t token);

/* Map the memory behind `path` as `rank`. Null if it cannot be opened or is not the one with that token. */
DS_API ds_shm_channel *ds_shm_attach(const char *path, uint64_t token, int32_t rank, int32_t size);

/* After every rank has attached: a waiting thread spins for so many microseconds before it sleeps, and gives up after
 * timeout_ms. */
DS_API void ds_shm_start(ds_shm_channel *channel, int32_t spin_us, int64_t timeout_ms);

/* Append it to what was issued before; returns a ticket (> 0) for ds_shm_wait. A thread of the channel runs it unless
 * somebody waits sooner. */
DS_API int64_t ds_shm_issue(ds_shm_channel *channel, const ds_shm_operation *operation);
/* Block until the operation of this ticket is done; runs what was issued up to it. */
DS_API int32_t ds_shm_wait(ds_shm_channel *channel, int64_t ticket);
/* How many issued operations are done: those with a ticket up to this one. */
DS_API int64_t ds_shm_completed(ds_shm_channel *channel);
/* After a failure. */
typedef struct ds_shm_failure {
    int64_t operations;       /* how many operations this rank has begun */
    int64_t their_operations; /* and the silent rank */
    ds_shm_call their_call;   /* the one that the silent rank is in; only if the status is DS_SHM_MISMATCH */
    int32_t silent_rank;      /* who was waited for (inside the group), else -1 */
} ds_shm_failure;
DS_API void ds_shm_explain(ds_shm_channel *channel, ds_shm_failure *failure);
/* Give up what is under way, unmap, free. Nothing of the channel may be used afterwards. */
DS_API void ds_shm_close(ds_shm_channel *channel);

#ifdef __cplusplus
}
#endif
#endif

/* Asynchronous file access: an engine of worker threads that move blocks between memory and files.
 *
 *  - An operation moves one run of bytes between memory and a file. It is cut into blocks; the workers of the engine take
 *    blocks in order and keep up to `queue_depth` of them under way in the kernel each.
 *  - Callers see no alignment rule. Whole aligned blocks go past the page cache (O_DIRECT), by way of an aligned buffer
 *    where the caller's memory is not aligned; heads and tails of a write go through the page cache.
 *  - Errors are values: negative errno, with the file offset where it happened. Nothing here aborts.
 */
#ifndef DEEPSPEED_AIO_H
#define DEEPSPEED_AIO_H

#include "deepspeed_host.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ds_aio_engine ds_aio_engine;

enum ds_aio_transport { DS_AIO_IO_URING = 0, DS_AIO_LIBAIO = 1, DS_AIO_THREADS = 2 };

typedef struct ds_aio_options {
    int64_t block_size;     /* bytes per request */
    int32_t queue_depth;    /* requests under way per worker */
    int32_t single_submit;  /* one system call per request */
    int32_t overlap_events; /* refill the queue at each completion; else when half of it has completed */
    int32_t parallelism;    /* workers */
    int32_t transport;      /* enum ds_aio_transport: the first one to try; what is missing is passed over */
} ds_aio_options;


/* Null, with a negative errno in *status, if threads or memory are lacking; else *status is the transport in use. */
DS_API ds_aio_engine *ds_aio_open(const ds_aio_options *options, int32_t *status);

/* Waits for what is under way and frees the engine. */
DS_API void ds_aio_close(ds_aio_engine *engine);

/* Starts to move `bytes` between `data` and `path` from `file_offset` on. A file that is written is made if it is
 * missing, and grows if it is short; it is never cut. Returns a ticket >= 0, or a negative errno (-ENODATA: the file is
 * shorter than what is asked for) and then nothing was started. */
DS_API int64_t ds_aio_start(ds_aio_engine *engine, int32_t write, void *data, int64_t bytes, const char *path,
                            int64_t file_offset);

/* Waits until the operation is complete, forgets it, and returns 0 or its errno; *offset says where. */
DS_API int32_t ds_aio_finish(ds_aio_engine *engine, int64_t ticket, int64_t *offset);

/* Bytes to which memory and file offsets have to be aligned for direct access; 0 where the file has none. */
DS_API int32_t ds_aio_alignment(const char *path);

#ifdef __cplusplus
}
#endif
#endif

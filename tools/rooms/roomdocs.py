import ast
ROOM_DOCS = {
'base': '''Lowest room: the accelerator, environment, logging, errors, random state, small arithmetic. No torch.distributed.

Everything above may use it. Start reading: `accelerator/abstract_accelerator.py`, `logging.py`.
''',
'ops': '''Arithmetic: host and GPU kernels and the optimizers built on them, number formats, attention, asynchronous files.

`native.py` loads the host library that `csrc/` builds; `gpu/` has the Triton kernels, each beside a plain reference;
`formats/` has every few-bit number format. Uses `base`; submodules are imported on first use. Start reading:
`native.py`, `multi_tensor.py`.
''',
'config': '''The config: from JSON to a schema, from the schema to a plan. Every mistake is found before anything is built.

`sections/` has the pydantic model of each section a user may write, `schema.py` joins them, `analysis.py` reports all
mistakes at once, `plan.py` holds the decisions, which everything above reads instead of the config. Uses `base` and
`ops`. Start reading: `schema.py`, then `plan.py`.
''',
'comm': '''Communication: `from deepspeed import comm as dist` reads like torch.distributed.

Public functions are in `functions.py` (made from `TorchBackend` in `torch.py`) and `init.py`. The training
core uses `collectives.py` (Communicator) and `mesh.py` (ProcessMesh) instead; `transports/` moves the bytes and `hangs/`
explains ranks that wait. Uses `base`, `ops`, `config`.
''',
'optim': '''Optimizers beyond the fused ones of `ops`: compressed (1-bit) ones, schedules, loss scaling, the first state.

Uses `comm` and below; knows nothing of ZeRO. Start reading: `lr_schedules.py`, `loss_scaler.py`, `one_bit.py`.
''',
'data': '''Data: loaders, samplers, curricula, data analysis, token routing, packing.

Uses `base` to `optim`. Start reading: `loader.py`.
''',
'observe': '''Measuring without knowing an engine: monitors, the live record, the flops profiler, timelines, audits, timers.

The engine's observers (`engine/observers`) feed it. Start reading: `monitor/monitor.py`, `flops/profiler.py`.
''',
'checkpoint': '''Checkpoints: writing them safely, and loading any of them into any layout (docs/checkpoints.md).

A file says which interval of which parameter it holds; loading intersects intervals. `files/` writes and verifies,
`foreign/` reads the layouts of release 0.19 and of others, `storage/` has the documented pluggable engines. Start
reading: `shards.py`, `save.py`, `load.py`.
''',
'zero': '''ZeRO stages 0 to 3 on one core: sharded optimizer state, gradients and parameters (docs/zero.md).

`layout.py` lays parameters out in buckets, `gradients/` is the only path from a gradient to a collective, `states/` owns
masters and moments, `step.py` updates, `gathering/` is stage 3, `offload/` keeps state outside the device. Reads
`base`, `config.plan`, `ops`, `comm`, `optim`, `checkpoint`. Start reading: docs/life_of_a_step.md, `layout.py`, `wiring.py`.
''',
'parallel': '''Models split over ranks: `tensor/` layers, `sequence/` shards, `pipeline/` stages, `expert/` mixtures.

Each writes a placement on the parameters that it splits; the room `zero` reads it and knows nothing else of the split.
Start reading: `tensor/planning/planner.py`, `pipeline/stage_run.py`, `sequence/exchange.py`, `expert/dispatch.py`.
''',
'compression': '''Quantization-aware training, pruning, layer reduction and MoQ (docs/compression.md).

Knows parallel layers, of which each rank compresses its part. Start reading: `compress.py`, `techniques.py`.
''',
'planning': '''Memory and step time before anything is allocated: bytes per rank by phase, place and kind (docs/memory.md).

Runs the core's own code over simulated ranks and counted memory, so that a plan cannot drift from a run. Start reading:
`planner.py`, `rehearsal.py`, `step_time/step.py`.
''',
'inference': '''Inference over unchanged models: a paged KV cache, continuous batching, quantized weights, an HTTP server.

Start reading: `generation/generator.py`, `scheduling/scheduler.py`, `model/runner.py`, `serving/app.py`.
''',
'engine': '''The training engine: `initialize` -> `assembly` (builds every part in order) -> `engine` (forward, backward, step).

Observers subscribe to the engine's events (`observers/`); `hybrid_engine.py` and `rollout/` train and generate. Start
reading: `initialize.py`, `assembly.py`, `engine.py`.
''',
'tools': '''Everything with a command line: launcher, config checks, plan, autotuner, elastic jobs, io, diff, live page, doctor.

`ds.py` lists the commands. Start reading: `launcher/runner.py`.
''',
}
for r, text in ROOM_DOCS.items():
    f = PKG/r/'__init__.py'; src = f.read_text(); tree = ast.parse(src)
    rest = '\n'.join(src.split('\n')[tree.body[0].end_lineno:]) if tree.body else ''
    lines = text.strip().split('\n'); 
    doc = '"""'+text.strip()+'\n"""'
    f.write_text(doc+'\n'+(('\n'+rest.strip()+'\n') if rest.strip() else ''))
SUBDOCS = {
'engine/pipeline': 'The engine of a pipeline: whole batches through all stages.',
'checkpoint/files': 'Files of a checkpoint: written so that a crash at any instant leaves one that loads, and verified when read.',
'checkpoint/foreign': 'Checkpoints of others: release 0.19, universal ones, and plain weights.',
'comm/hangs': 'Hangs: what every rank was doing, and which one the others wait for.',
'comm/transports': 'Transports: how the bytes of a collective travel, chosen per group.',
'compat/autotuning': 'Documented names of the autotuner.',
'compat/checkpoint': 'Documented helpers for checkpoints of Megatron-DeepSpeed.',
'config/sections': 'Sections of the config: one pydantic model for each, with its defaults and documentation.',
'engine/observers/progress': 'Observers that report how a run is doing: lines, curves, timings, the live page.',
'inference/generation': 'Generation: continuous batching, sampling, and the loops around them.',
'inference/quantized': 'Integer weights of generating models: which layers get them, and calibration.',
'inference/split': 'Models whose layers are split over ranks for inference.',
'ops/formats': 'Number formats of few bits: encoding, decoding, packing.',
'parallel/pipeline/messages': 'Messages between stages: channels and what travels in them.',
'parallel/pipeline/schedules': 'Schedules: in which order stages work, as data that is simulated without processes.',
'tools/launcher/hosts': 'Launching over several hosts: ssh, pdsh, MPI and Slurm.',
'zero/gradients': 'Gradients: from autograd to their sum over ranks.',
'zero/states': 'Master weights and optimizer state: who owns which fragment, and access by parameter.',
}
for d, text in SUBDOCS.items():
    f = PKG/d/'__init__.py'
    if f.exists() and len(f.read_text().strip().split('\n')) <= 1: f.write_text('"""'+text+'"""\n')

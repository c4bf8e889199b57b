t = rd('docs/architecture.md'); i = t.index('## The seams')
head = '''# Architecture

A five-minute tour of the code: the rooms, what each may use, where to start reading, and the seams at which a feature is
added. [The life of a step](life_of_a_step.md) then follows one batch through it.

![the rooms, lowest at the bottom: imports point downward](images/house.svg)

A *room* is a folder directly under `deepspeed/`. The rooms have one order, and an import, in whatever form it is written, goes
to the same room or to one below. `tests/test_architecture.py` holds the list of rooms and fails on an upward import, a cycle
between modules, a room with more than 20 % of the lines, or a folder with more than 25 modules.

## The rooms

From the lowest to the highest. The first paragraph of each room's `__init__.py` says the same.

| room | what lives there | start reading |
|---|---|---|
| `base` | the accelerator, environment, logging, errors, random state; no torch.distributed | `accelerator/abstract_accelerator.py` |
| `ops` | arithmetic: host and GPU kernels, the optimizers built on them, number formats, attention, asynchronous files | `native.py`, `multi_tensor.py` |
| `config` | from JSON to a *schema* (`sections/` has the model of each section), from the schema to a *plan*, which everything above reads | `schema.py`, `plan.py` |
| `comm` | the mesh of ranks, collectives, transports, what explains hangs, and the documented functions | `mesh.py`, `collectives.py` |
| `optim` | compressed optimizers, schedules, loss scaling, the first state of an optimizer | `lr_schedules.py`, `one_bit.py` |
| `data` | loaders, samplers, curricula, data analysis, which tokens a layer processes | `loader.py` |
| `observe` | what measures without knowing an engine: monitors, the live record, the flops profiler, timelines, audits | `monitor/monitor.py`, `flops/profiler.py` |
| `checkpoint` | files that say which interval of which parameter they hold; loading intersects intervals | `shards.py`, `save.py`, `load.py` |
| `zero` | the common core of stages 0 to 3: buckets, gradients, states, the step; `gathering/` is stage 3, `offload/` keeps state outside the device | `layout.py`, `wiring.py`, `step.py` |
| `transforms` | what changes a module or its inputs before sharding: activation checkpointing, LoRA, sparse attention, compile passes | `module_transforms.py` |
| `parallel` | models split over ranks: `tensor/` layers, `sequence/` shards, `pipeline/` stages, `expert/` mixtures | `tensor/planning/planner.py`, `pipeline/stage_run.py` |
| `compression` | quantization-aware training, pruning, layer reduction, MoQ | `compress.py`, `techniques.py` |
| `planning` | memory and step time before anything is allocated, computed by the core's own code over simulated ranks | `planner.py`, `rehearsal.py` |
| `inference` | a paged KV cache, continuous batching, quantized weights, ZeRO-Inference, the HTTP server | `generation/generator.py`, `model/runner.py` |
| `engine` | `initialize`, the assembly of all parts, the engine, its observers, the hybrid engine, rollouts | `initialize.py`, `assembly.py`, `engine.py` |
| `tools` | everything with a command line: launcher, config checks, plan, autotuner, elastic jobs, diff, live page, doctor | `ds.py`, `launcher/runner.py` |
| `compat` | documented paths and names of release 0.19 that are nobody's room | `aliases.py` |

Beside the package: `csrc/` is the native library of the host (one folder per kernel, one C header for all), `tests/`,
`benchmarks/` (a script per performance claim, with what it printed), `examples/`, `docs/`.

**Config.** JSON -> schema -> plan -> objects. `analysis.py` finds every mistake in one pass, before any process group or
allocation; `axes.py` decides how the ranks are arranged; `availability.py` lists what is still refused by name. No code outside
reads the stage or a dtype flag; it asks the plan.

**The core.** Parameters are laid out in *buckets* (`zero/layout.py` has the arithmetic, `zero/bucket.py` the weights,
`zero/gradients/bucket.py` the gradients). `GradReducer` (`zero/gradients/reducer.py`) is the only path from a gradient to a
collective; `StateStore` (`zero/states/store.py`) owns master weights and optimizer state; `StepExecutor` (`zero/step.py`)
agrees on the norm, clips, updates and publishes; `StateAccess` (`zero/states/access.py`) reads and writes all of it by
parameter. At stage 3 `ParamCoordinator` knows which call needs what in which phase, `Transitions` alone decides when a bucket
is whole, and a gatherer moves the shards.

**The engine.** `engine/assembly.py` is the composition root: straight-line code that creates every part in order.
`engine/engine.py` has forward, backward and step and delegates everything else. Observers (`engine/observers`) subscribe to
the engine's events; the engine knows none of them by name.

**Documented paths.** A client writes `deepspeed.runtime.zero.partition_parameters`; our module is
`deepspeed.zero.gathering.init_context`. `compat/aliases.py` is the table from one to the other, and an import of the
documented path returns the same module object, so that a client that replaces a name there replaces the one we look up.

'''
wr('docs/architecture.md', head+t[i:])
c = rd('CONTRIBUTING.md')
a = c.index('    tools > assemblies'); b = c.index('Documented names whose feature does not exist')
c = c[:a]+'''    compat > tools > engine > inference > planning > compression > parallel > transforms > zero > checkpoint > observe
    > data > optim > comm > config > ops > base

Each of these is a *room*: a folder directly under `deepspeed/`. `tests/test_architecture.py` holds the list, and fails on an
upward import or a cycle. A feature is added as a new object at an existing seam, chosen in `config/plan.py` and wired in
`engine/assembly.py`. If no seam fits, widen one first, in a separate commit. Only `plan.py` branches on the ZeRO stage or on
dtype flags.

A documented path of release 0.19 is a row in `compat/aliases.py` that leads to our module. Code that exists only for such a
path lives in `compat/`, and nothing of ours imports it.

'''+c[b:]
wr('CONTRIBUTING.md', c)
d = rd('tools/draw_diagrams.py')
a = d.index('def house() -> Drawing:'); b = d.index('@dataclass\nclass Pictured')
d = d[:a]+'''def house() -> Drawing:
    """The rooms, lowest at the bottom: imports point downward."""
    d = Drawing(960, 560, "The rooms of the package: imports point downward")
    floors = (
        ("names of 0.19", "plain", ("compat",)),
        ("commands", "plain", ("tools",)),
        ("what a user builds", "file", ("inference", "engine")),
        ("the model", "weights", ("transforms", "parallel", "compression", "planning")),
        ("the core", "state", ("checkpoint", "zero")),
        ("around the core", "gradients", ("optim", "data", "observe")),
        ("foundations", "plain", ("base", "ops", "config", "comm")),
    )
    for floor, (name, kind, rooms) in enumerate(floors):
        y = 24 + 72 * floor
        d.text(20, y + 26, name, size=14, bold=True, anchor="start")
        width = (760 - 12 * (len(rooms) - 1)) / len(rooms)
        for number, room in enumerate(rooms):
            d.box(180 + number * (width + 12), y, width, 52, room, kind, size=13)
        if floor + 1 < len(floors):
            d.arrow((560, y + 52), (560, y + 72))
    said = "A module imports only from its own room and those below: on lower floors, or further left on its floor."
    d.text(480, 540, said, size=13, colour=SOFT)
    return d


'''+d[b:]
wr('tools/draw_diagrams.py', d)
(R/'docs/glossary.md').write_text(open('tools/rooms/glossary.md').read())
y = rd('mkdocs.yml')
i = y.index('  - How it works:'); j = y.index('\n', i)
y = y[:j+1]+'      - Glossary: glossary.md\n'+y[j+1:]
wr('mkdocs.yml', y)
t = rd('README.md').replace('| understand the code | [architecture](docs/architecture.md),', '| understand the code | [architecture](docs/architecture.md), [glossary](docs/glossary.md),'); wr('README.md', t)

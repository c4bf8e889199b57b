"""ZeRO stages 0 to 3 on one core: sharded optimizer state, gradients and parameters (docs/zero.md).

`layout.py` lays parameters out in buckets, `gradients/` is the only path from a gradient to a collective, `states/`
owns masters and moments, `step.py` updates, `gathering/` is stage 3, `offload/` keeps state outside the device. Reads
`base`, `config.plan`, `ops`, `comm`, `optim`, `checkpoint`. Start reading: docs/life_of_a_step.md, `layout.py`,
`factory.py`.
"""

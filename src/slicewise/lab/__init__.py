"""The laboratory: simulated and recorded workloads, statistics, sweeps, planning and reports.

An `experiment` draws requests (`mix`, `workload`) and runs them under each policy: compiled
(`packed_tables`, `kernel`, `compiled_loops`) or on the engine (`engine_loop`). `runner` runs it on
an executor and `results` turns the runs into rows. `trace`, `timeline` and `replay` do the same
for recorded requests; `planning` and `sizing` search for the smallest cluster. `paper/` compares
with the published figures, `figures/` draws. Entry points: `run_experiment`, `replay.compare`,
`make_plans`, `load_sweep`. Imports `engine`, `policies`, `catalog` and `core`; needs the extra
``lab``.
"""

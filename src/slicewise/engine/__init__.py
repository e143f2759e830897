"""The engine: the scheduler, the queue and the planner of moves.

`scheduler.Scheduler` is the entry point: it asks a policy, checks the choice and applies it. It
alone decides placements. Imports `core` and `policies`.
"""

"""Placement policies, one idea a file.

`base` defines what a policy is, `registry.policy` finds one by name, `ranking` compiles a policy
into ranks over states, and `reference` has the slow twins. Imports `core`.
"""

"""The demonstration behind `slicewise demo`: a simulated cluster with live traffic.

`cluster` sets up nodes and tenants, `traffic` sends their requests, and `agents` runs real agents
on a fake driver. May import `client`, `agent`, `fakedriver` and what is below them.
"""

"""The domain: GPU geometry, fragmentation, states, clusters and requests.

`geometry.Geometry` describes a GPU model, `cluster.Cluster` holds GPUs and their instances,
`request.Request` is what a tenant asks for. Pure: no I/O, no clock, no randomness. Imports NumPy
and no other package.
"""

"""The pure domain: geometry, fragmentation, states, clusters, requests. No I/O, no clock."""

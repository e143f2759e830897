"""The HTTP service: framing, authentication, limits and the routes of the API.

Entry points: `service.Service` (one process over a store) and `server.serve` (on a socket).
`app.py` holds the steps of every request; `routes/` has one module for each resource.
May import the runtime and the packages below it.
"""

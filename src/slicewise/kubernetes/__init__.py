"""The Kubernetes controller: allocates slices to ResourceClaims; kube-scheduler binds the pods.

`controller.Controller` is the entry point. `informer` watches the API, `event_handlers` update
the `cache`, `cycle` chooses devices, `allocation_writer` writes them. `claim_states` has the states
of a claim and the transitions. May import core, catalog, policies, engine, journal and control.
"""

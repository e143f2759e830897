"""The service: an HTTP interface to the control plane, durable through whatever store it gets."""

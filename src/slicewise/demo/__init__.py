"""The demonstration: a cluster that does not exist, and tenants who use it."""

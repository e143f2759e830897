"""The wire schemas, one module per resource, shared by server and client.

Request bodies derive from `base.Body` and refuse unknown fields; responses derive from `base.View`.
The OpenAPI document is generated from the same types. Imports only the journal's entry types.
"""

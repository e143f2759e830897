"""The journal's entries: every fact that changes the state of the service.

`entries` has the entries and the records in them, `agent_entries` those that agents cause, and
`records` their base types. Stores keep the entries as JSON, and `slicewise.control` applies them.
Imports no other package.
"""

"""The handlers of the API, one module for each resource; `table.py` lists all routes.

May import the server, the runtime and the packages below them.
"""

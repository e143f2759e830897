"""The handlers of the API, one module for each resource; `table.py` lists all routes."""

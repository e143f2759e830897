"""The engine: decides, checks and commits; the only room that changes a cluster."""

"""The command line: wires the real parts together, and holds no logic of its own."""

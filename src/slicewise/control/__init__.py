"""The control plane: decides commands and records the decisions as journal entries.

`CommandHandler` (handler.py) is the entry point: a command (commands.py) goes in, an answer and
entries come out. `State` (state.py) is the result of applying entries. The package is pure: no
threads, no clock, no I/O. Storage and time come in through the protocols of ports.py.
Imports journal, api, engine and the packages below them.
"""

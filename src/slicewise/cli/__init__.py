"""The command line: parses options, calls the other packages and prints.

`main.run` is the entry point; `commands` lists the commands, each in the module of its name and
loaded when it runs. Errors become one line. May import every package.
"""

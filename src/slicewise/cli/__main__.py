"""`python -m slicewise.cli`: the same as the `slicewise` command."""

from slicewise.cli.main import run

if __name__ == "__main__":  # worker processes import this module too
    run()

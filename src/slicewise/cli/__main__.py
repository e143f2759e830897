"""`python -m slicewise.cli`: the same as the `slicewise` command."""

from __future__ import annotations

import sys

_NEEDED = {"numpy", "rich", "typer"}


def main(plugin: bool = False) -> None:
    """Run the command line and exit."""
    try:
        if plugin:
            from slicewise.cli.kubectl import run
        else:
            from slicewise.cli.main import run
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        sys.exit(
            f"error: {error.name} is not installed: install slicewise[cli], or another extra that "
            "includes it (service, k8s, lab); an agent needs none: python -m slicewise.agent"
        )
    run()


def kubectl() -> None:
    """Run the plugin of kubectl and exit."""
    main(plugin=True)


if __name__ == "__main__":  # worker processes import this module too
    main()

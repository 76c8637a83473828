"""The ``fleet`` command, and ``python -m fleet``: packages are looked for before any of them is loaded."""

from __future__ import annotations

import sys

from fleet.app.scripts import check_not_shadowed
from fleet.errors import ConfigError


def main() -> None:
    """Entry point. Exits with 2 when Python would load somebody else's package instead of one of ours."""
    try:
        check_not_shadowed()
    except ConfigError as error:
        print(f"fleet: {error}", file=sys.stderr)
        sys.exit(2)
    from fleet.cli.main import main as command

    command()


if __name__ == "__main__":
    main()

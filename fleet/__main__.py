"""The ``fleet`` command, and ``python -m fleet``: it checks for shadowed packages before it loads any."""

from __future__ import annotations

import atexit
import os
import sys

from fleet.errors import ConfigError
from fleet.host.packages import check_not_shadowed
from fleet.protocol.exit_codes import Exit


def main() -> None:
    """Entry point. Exits with 2 when Python would load a package of the same name instead of one of Fleet's."""
    code = [int(Exit.FAILED)]
    atexit.register(_leave, code)  # atexit calls the first registered function last
    try:
        _command()
        code[0] = Exit.DONE
    except SystemExit as ended:
        code[0] = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except KeyboardInterrupt:
        code[0] = Exit.STOPPED
        raise


def _command() -> None:
    try:
        check_not_shadowed()
    except ConfigError as error:
        print(f"fleet: {error}", file=sys.stderr)
        sys.exit(Exit.REFUSED)
    from fleet.app.cli.main import main as command

    command()


def _leave(code: list[int]) -> None:
    """End the process at once, with all output written. The interpreter's own shutdown has hung next to threads of Ray's libraries."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader of this stream has gone
            continue
    os._exit(code[0])


if __name__ == "__main__":
    main()

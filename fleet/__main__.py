"""The ``fleet`` command, and ``python -m fleet``: packages are looked for before any of them is loaded."""

from __future__ import annotations

import atexit
import os
import sys

from fleet.errors import ConfigError
from fleet.host.packages import check_not_shadowed
from fleet.protocol.exit_codes import Exit


def main() -> None:
    """Entry point. Exits with 2 when Python would load somebody else's package instead of one of ours."""
    code = [int(Exit.FAILED)]
    atexit.register(_leave, code)  # what is registered first is called last
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
    """End at once: all is written. What the interpreter would still do, next to threads of Ray's libraries, has been seen to hang."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # whoever read has gone
            continue
    os._exit(code[0])


if __name__ == "__main__":
    main()

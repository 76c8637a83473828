"""Ray's agent of a node, without the parts that serve Ray's dashboard: what a node host starts in its place.

Ray's own, told ``--minimal``, still loads all of its parts where their dependencies happen to be installed. They then look for a dashboard
every second, for events every two, and sum up the machine's processes every five: 7 ms of a core each second and 43 MB, on each node.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Run the script that the first argument names, with the rest as its own."""
    del sys.argv[0], sys.path[0]  # this folder: its modules would hide some of Python's
    from ray.dashboard import utils

    utils.get_all_modules = lambda kind: []
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

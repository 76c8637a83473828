"""Ray's agent of a node, without the parts that serve Ray's dashboard. A node host starts it in the place of Ray's own.

With ``--minimal``, Ray's own agent still loads each part whose dependencies are installed. The parts look for a dashboard every second and
for events every two, and sum up the machine's processes every five. On each node that takes 7 ms of a core each second, and 43 MB.
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

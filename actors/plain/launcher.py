"""The process of PyTorch's own launcher, for a job without Fleet: when one rank is lost, it ends all ranks and starts them again."""

from __future__ import annotations

import sys

from fleet.host.linux import die_with_parent

RESTARTS = 1_000_000
"""The launcher restarts all ranks up to so often; Fleet ends it when restarts make no progress."""

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each launch uses a store of its own, unless the environment says otherwise.

The launcher of PyTorch 2.13 keeps one store for all launches. With gloo a rank may then find the address of a killed process there. It
tries to connect for some seconds and fails, and all ranks start once more.
"""


def words(world: int, worker: str, script: str, arguments: list[str]) -> list[str]:
    """The arguments of ``torchrun``: one machine, a free port, all ranks in one group."""
    options = ["--standalone", "--nnodes=1", f"--nproc-per-node={world}", f"--max-restarts={RESTARTS}"]
    return [*options, worker, script, *arguments]


def main() -> None:
    """Run ``launcher.py`` with the arguments of :func:`words`. It ends with the command that has started it."""
    die_with_parent()
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()

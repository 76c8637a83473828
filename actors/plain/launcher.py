"""The process that is PyTorch's own launcher, for a job that is not Fleet's: when one rank is lost, it ends all and starts all again."""

from __future__ import annotations

import sys

from fleet.host.linux import die_with_parent

RESTARTS = 1_000_000
"""So often the launcher starts all ranks again; Fleet ends it when nothing comes of that."""

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each launch meets on a store of its own, unless the environment says otherwise. The launcher of PyTorch 2.13 keeps one for all, and with
gloo a rank may then find there the address of a process that was killed: it tries for some seconds, fails, and all start once more."""


def words(world: int, worker: str, script: str, arguments: list[str]) -> list[str]:
    """What ``torchrun`` is told: one machine, a free port, all ranks in one group."""
    options = ["--standalone", "--nnodes=1", f"--nproc-per-node={world}", f"--max-restarts={RESTARTS}"]
    return [*options, worker, script, *arguments]


def main() -> None:
    """``launcher.py`` with the words of :func:`words`. It ends with the command that has started it."""
    die_with_parent()
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()

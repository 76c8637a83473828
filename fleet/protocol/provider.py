"""Where a run's processes live: what a run asks of its cluster, whether it was started for the run or was there before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fleet.protocol.ports import NodePort

NAMESPACE = "fleet"
"""Of Ray's named actors: what belongs to Fleet is found there."""
MEMORY, FOLDER_PREFIX = Path("/dev/shm"), "fleet-"
"""Where a node's folders in memory are, and how the names of runs' begin."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node as a run sees it.

    Attributes:
        id: Ray's id of the node.
        host: the address at which processes of other nodes reach those of this one.
        name: by which the node is known from run to run.
        labels: what Ray knows of the node, such as its rack.
    """

    id: str
    host: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Cluster(NodePort, Protocol):
    """A Ray cluster, to which this process is connected. Its nodes have indices, which are never used again.

    Attributes:
        address: ``host:port`` of its control plane.
        shares_folders: files of this process are there on all nodes under the same path.
        slot: resources of Ray that one rank takes.
        selector: conditions on Ray's labels of the nodes that ranks may be on, by key.
    """

    address: str

    @property
    def shares_folders(self) -> bool: ...

    @property
    def slot(self) -> Mapping[str, float]: ...

    @property
    def selector(self) -> Mapping[str, str]: ...

    def place(self, index: int, limit_s: float = 30.0) -> NodePlace:
        """The node of this index, once Ray knows it. Raises RunFailed."""

    def folder(self) -> Path:
        """A new folder in memory for the sockets and rings of one run's ranks. Where no folders are shared, each agent makes its own."""

    @property
    def head(self) -> str:
        """The address at which nodes reach what lives on the head."""

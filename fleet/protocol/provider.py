"""The interface of a run to its cluster, for a cluster that was started for the run and for one that was there before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fleet.protocol.ports import NodePort

NAMESPACE = "fleet"
"""Namespace of Fleet's named actors in Ray."""
MEMORY, FOLDER_PREFIX = Path("/dev/shm"), "fleet-"
"""The place of a node's folders in memory, and the prefix of runs' folders there."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node of a run.

    Attributes:
        id: Ray's id of the node.
        host: the address at which processes of other nodes reach processes of this node.
        name: the same name of the node in every run.
        labels: Ray's labels of the node, such as its rack.
    """

    id: str
    host: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Cluster(NodePort, Protocol):
    """A Ray cluster to which this process is connected. Its nodes have indices, and an index is never used again.

    Attributes:
        address: ``host:port`` of its control plane.
        shares_folders: all nodes see files of this process under the same path.
        slot: Ray resources that one rank takes.
        selector: conditions on Ray's labels, by key, for nodes that may have ranks.
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
        """A new folder in memory for the sockets and rings of one run's ranks. Without shared folders, each agent makes its own."""

    @property
    def head(self) -> str:
        """The address at which nodes reach processes on the head."""

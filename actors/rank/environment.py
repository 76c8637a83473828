"""How a rank's process is set up. It changes no result, only where time and memory go."""

from __future__ import annotations

RANK_ENVIRONMENT = {
    # Copies of 256 KiB and more write past the caches: a third less memory traffic, and what computes keeps its caches. The default follows
    # from the size of the last-level cache; a virtual machine often names that of the whole host, and then no copy is ever large enough.
    # From 16 times as much on, four pages are copied at once instead of two, which takes a sixth less time.
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000",
    # Large tensors lie in huge pages: to copy them takes a seventh less time.
    "THP_MEM_ALLOC_ENABLE": "1",
    # A thread that waits at the end of a parallel loop gives up its core instead of spinning: the copy of the state may run there.
    "OMP_WAIT_POLICY": "passive",
    # What a rank prints is what it prints: Ray Train would turn it into messages of its logger, which nobody sees.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
"""Variables that have to be set before the process starts."""

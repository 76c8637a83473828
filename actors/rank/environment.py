"""How a rank's process is set up. It changes no result, only the use of time and memory."""

from __future__ import annotations

RANK_ENVIRONMENT = {
    # Copies of 256 KiB and more write past the caches: a third less memory traffic, and computing threads keep their caches. The default
    # depends on the size of the last-level cache. A virtual machine often reports that of the whole host, and then no copy is large enough.
    # From 16 times as much on, four pages are copied at once instead of two, which takes a sixth less time.
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000",
    # Large tensors lie in huge pages: to copy them takes a seventh less time.
    "THP_MEM_ALLOC_ENABLE": "1",
    # A thread at the end of a parallel loop gives up its core instead of spinning, so the copy of the state can run there.
    "OMP_WAIT_POLICY": "passive",
    # Otherwise Ray Train would turn a rank's output into messages of its own logger, which are not shown.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
"""Variables that have to be set before the process starts."""

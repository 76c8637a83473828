"""How a rank's process is set up."""

from __future__ import annotations

import subprocess
import sys

ARENAS = """
import ctypes, sys, tempfile, threading
from fleet.host.linux import use_one_arena
libc = ctypes.CDLL(None)
if sys.argv[1] == "one":
    use_one_arena()
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(4)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
with tempfile.NamedTemporaryFile("r") as told:
    libc.fopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    file = libc.fopen(told.name.encode(), b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(told.read().count("<heap nr="))
"""

LARGE = """
import ctypes, sys
from fleet.host.linux import give_large_blocks_back
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
libc = ctypes.CDLL(None)
if sys.argv[1] == "back":
    give_large_blocks_back()
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo2.restype = Info
libc.free(libc.malloc(8 << 20))
before = libc.mallinfo2().hblks
libc.malloc(4 << 20)
print(libc.mallinfo2().hblks - before)
"""


def _counted(program: str, which: str) -> int:
    return int(subprocess.run([sys.executable, "-c", program, which], capture_output=True, text=True, check=True, timeout=60).stdout)


def test_threads_of_a_rank_allocate_from_one_arena() -> None:
    assert _counted(ARENAS, "one") == 1 < _counted(ARENAS, "several"), "with glibc a thread has an arena of its own otherwise"


def test_large_blocks_of_a_rank_with_sharded_parameters_are_the_kernels() -> None:
    assert _counted(LARGE, "back") == 1 > _counted(LARGE, "kept"), "glibc has raised the size of such blocks behind a larger one"

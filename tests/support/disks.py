"""Small filesystems of their own on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.programs import blkio, namespaces, program


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A filesystem of so many mebibytes at ``folder``, which is made. Skips the test where there can be none."""
    with _mounted(folder, "-t", "tmpfs", "-o", f"size={mebibytes}m", "fleet-test"):
        yield folder


@contextmanager
def block_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """The same, on a block device of its own, made of a file beside it; where the kernel can limit such a device."""
    blkio()
    image = folder.with_suffix(".image")
    image.touch()
    os.truncate(image, mebibytes << 20)
    subprocess.run([program("mkfs.ext4"), "-q", str(image)], check=True, timeout=60)
    with _mounted(folder, "-o", "loop", str(image)):
        yield folder


@contextmanager
def _mounted(folder: Path, *words: str) -> Iterator[Path]:
    namespaces()
    folder.mkdir()
    subprocess.run([program("mount"), *words, str(folder)], check=True, timeout=60)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=60)

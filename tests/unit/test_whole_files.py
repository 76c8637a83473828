"""A file that others look for is never seen empty."""

from __future__ import annotations

import threading
from pathlib import Path

from fleet.host.whole_files import write_whole


def test_a_reader_sees_the_old_text_or_the_new_one(tmp_path: Path) -> None:
    path, over, seen = tmp_path / "coordinator", threading.Event(), set[str]()
    write_whole(path, "127.0.0.1:1")

    def write() -> None:
        for port in range(2000):
            write_whole(path, f"127.0.0.1:{port}")
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        seen.add(path.read_text().rpartition(":")[0])
    writer.join()
    assert seen == {"127.0.0.1"}
    assert [each.name for each in tmp_path.iterdir()] == ["coordinator"]

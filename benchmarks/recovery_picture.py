"""The recovery of each system on one time axis: ``python -m benchmarks.recovery_picture RECOVERY.json PICTURE.svg``.

RECOVERY.json is what ``python -m benchmarks.recovery --json RECOVERY.json`` wrote. A line shows the samples that a system's state has been
trained on since its first kill. It is flat while the system recovers, and falls where the system goes back to a checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.recovery import SHOWN_S

NAMES = {"fleet": "Fleet", "torchft": "torchft", "stock": "Ray Train, from a checkpoint"}
WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 64, 52
STYLE = """
    text { fill: #1f2933; font: 14px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; }
    .head { font-size: 15px; font-weight: bold; }
    .paper { fill: #ffffff; stroke: #cbd2d9; }
    .grid { stroke: #cbd2d9; }
    .kill { stroke: #52606d; stroke-dasharray: 4 4; }
    .fleet { stroke: #0f9d78; }
    .torchft { stroke: #0072b2; }
    .stock { stroke: #d55e00; }
    polyline { fill: none; stroke-width: 3; stroke-linejoin: round; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e4e7eb; }
      .paper { fill: #1b2129; stroke: #3e4c59; }
      .grid { stroke: #3e4c59; }
      .kill { stroke: #b8c2cc; }
      .fleet { stroke: #2fbf96; }
      .torchft { stroke: #4ea8de; }
      .stock { stroke: #f08a45; }
    }"""

Line = list[tuple[float, float]]


def lines(samples: Mapping[str, Sequence[float]]) -> dict[str, Line]:
    """By system, (seconds from the kill, samples trained since) of each commit. Raises ValueError where the result has none."""
    found = {
        name: list(zip(samples[f"{name}_commit_t_s"], samples[f"{name}_trained_samples"], strict=True))
        for name in NAMES
        if samples.get(f"{name}_commit_t_s")
    }
    if not found:
        raise ValueError("the result has no commits around a kill: it was not written by benchmarks.recovery of this version")
    return found


def stairs(line: Line) -> Line:
    """The line as it was: level until a commit, and then at once higher."""
    return [line[0], *(point for (_, low), (at_s, high) in pairwise(line) for point in ((at_s, low), (at_s, high)))]


def ticks(least: float, most: float, wanted: int) -> list[float]:
    """Round numbers between the two, about as many as ``wanted``."""
    rough = (most - least) / wanted
    size = 10 ** (len(str(int(rough))) - 1) if rough >= 1 else 1
    step = next(size * times for times in (1, 2, 5, 10) if size * times >= rough)
    first = -int(-least // step) * step
    return [first + number * step for number in range(int((most - first) / step) + 1)]


def picture(samples: Mapping[str, Sequence[float]], stalls_s: Mapping[str, float]) -> str:
    """The SVG of the samples of one result; ``stalls_s`` has the median stall of each system, for the legend."""
    drawn = lines(samples)
    begin_s, end_s = SHOWN_S[0], min(SHOWN_S[1], max(line[-1][0] for line in drawn.values()))
    low = min(value for line in drawn.values() for _, value in line)
    high = max(value for line in drawn.values() for at_s, value in line if at_s <= end_s)

    def x(at_s: float) -> float:
        return round(LEFT + (at_s - begin_s) / (end_s - begin_s) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title">',
        '<title id="title">Samples trained after one rank is killed, for each system on one time axis</title>',
        f"<style>{STYLE}\n  </style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
        f'<text class="head" x="{LEFT}" y="26">Samples trained after one of four ranks is killed</text>',
    ]
    for value in ticks(low, high, 5):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 5}" text-anchor="end">{value / 1000:g}k</text>')
    parts += [f'<text x="{x(at_s)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{at_s:g}</text>' for at_s in ticks(begin_s, end_s, 8)]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">seconds from the kill</text>')
    parts.append(f'<line class="kill" x1="{x(0)}" x2="{x(0)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    at = LEFT
    for name, line in drawn.items():
        points = " ".join(f"{x(at_s)},{y(value)}" for at_s, value in stairs(line) if at_s <= end_s)
        parts.append(f'<polyline class="{name}" points="{points}"/>')
        said = f"{NAMES[name]}: {stalls_s[name]:.3g} s"
        parts.append(f'<polyline class="{name}" points="{at},46 {at + 22},46"/><text x="{at + 28}" y="51">{said}</text>')
        at += 56 + 8 * len(said)
    return "\n  ".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery_picture", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    chosen = parser.parse_args()
    result = json.loads(chosen.result.read_text())
    stalls_s = {name: result["figures"].get(f"{name}_stall_s_median", 0.0) for name in NAMES}
    chosen.picture.write_text(picture(result["samples"], stalls_s))


if __name__ == "__main__":
    main()

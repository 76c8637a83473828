"""`exposed`: how much of a step is exchange that nothing hides, where parameters are kept in chunks, beside what the law of it says.

Two ranks of a model that ``fully_shard`` has cut, on two hosts, which are network namespaces, so root is needed. The link between them
carries a set rate, and is slow enough that the wire decides. Measured is what ranks record as exposed exchange, a step; the law
(:func:`fleet.laws.exchange.exposed_exchange`) is given the bytes of the model, the rate and latency of that link as a plain connection
reaches them in both directions at once, and how long the backward computed.

Without a copy each rank gathers half of the model, twice a step; with one it has all of it, and gathers nothing. Gradients are summed
behind the step, or leave in the backward.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import exposed_ranks, harness, price_ranks
from benchmarks.device_ranks import Transformer
from benchmarks.harness import Form, left_out, together
from benchmarks.mesh import settings_of
from benchmarks.mesh_ranks import Shape
from benchmarks.price import Fleet, Places
from fleet.laws.exchange import exposed_exchange, gathered_bytes, summed_bytes
from fleet.protocol.records import COMM, COMMIT, Record, Spans
from fleet.settings.run import RunSettings
from tests.support.plain import FORKED, PRELOADED
from tests.support.programs import namespaces, program

WORLD, WARM_STEPS, LIMIT_S = 2, 2, 400.0
BURST, MTU_SHARE = "16kb", 0.25
"""A link gives so much at once behind a pause: little beside a unit."""
SMALLEST = Shape(64, 2, 1)
GROWN = {"4mb": Shape(128, 5, 8), "39mb": Shape(320, 8, 8)}
RATES = {"4mb": "100mbit", "39mb": "500mbit"}


@dataclass(frozen=True)
class Case:
    """What is trained, on what link, how gradients leave, and how many copies there are."""

    name: str
    shape: Shape
    rate: str
    sync: str
    copies: int

    def settings(self, folder: Path, steps: int) -> RunSettings:
        told = settings_of(self.shape, WORLD, folder, sync=self.sync, steps=steps)
        return replace(told, optimizer_copies=self.copies)


def cases(shapes: dict[str, Shape]) -> list[Case]:
    return [
        Case(f"{name}_{sync}_{copies}_copies", shape, RATES[name], sync, copies)
        for name, shape in shapes.items()
        for copies in (0, 1)
        for sync in ("step", "shard")
    ]


# ---- the law ---------------------------------------------------------------------------------------------------------------------------


def units_of(shape: Shape) -> tuple[int, int, int]:
    """(bytes of the blocks, of what is around them, which is kept from forward to backward; units)."""
    model = Transformer(shape.width, shape.layers)
    whole = sum(one.nbytes for one in model.parameters())
    blocks = sum(one.nbytes for block in model.blocks[: shape.layers] for one in block.parameters())
    return blocks, whole - blocks, shape.layers + 1


def lawful_s(case: Case, link: dict[str, float], backward_s: float) -> float:
    """What the law says of the exposed exchange of a step."""
    blocks, around, units = units_of(case.shape)
    found = exposed_exchange(
        forward_bytes=gathered_bytes(blocks + around, WORLD, case.copies, 1),
        backward_bytes=gathered_bytes(blocks, WORLD, case.copies, 1),
        sum_bytes=summed_bytes(blocks + around, WORLD, case.copies, 1),
        bytes_per_s=link["bytes_per_s"],
        latency_s=link["latency_s"],
        backward_s=backward_s,
        units=units,
        leave=case.sync == "shard",
    )
    return found.total_s


# ---- what is measured ------------------------------------------------------------------------------------------------------------------


def exposed_s(records: Sequence[Record]) -> dict[int, list[float]]:
    """By committed step, what each rank recorded as exchange, in seconds."""
    found: dict[int, list[float]] = {}
    left_us: dict[Any, int] = {}
    for record in records:
        if not isinstance(record, Spans):
            continue
        us, step = left_us.get(record.member, 0), record.step
        for code, duration_us in zip(record.codes, record.durations_us, strict=True):
            us += duration_us if code == COMM else 0
            if code == COMMIT:
                found.setdefault(step, []).append(us / 1e6)
                us, step = 0, step + 1
        left_us[record.member] = us
    return found


def link_of(places: Places, size: int, folder: Path) -> dict[str, Any]:
    """What a plain connection reaches on the link; both ends' figures."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"link-{number}" for number in range(WORLD)]
    ends = [
        FORKED.Process(target=exposed_ranks.link_end, args=(place, places[1 - number].address, size, str(files[number])), daemon=True)
        for number, place in enumerate(places)
    ]
    for end in ends:
        end.start()
    for end in ends:
        end.join(LIMIT_S)
    found = [json.loads(file.read_text()) for file in files]
    rates = [rate for one in found for rate in one["bytes_per_s"]]
    return {"bytes_per_s": statistics.median(rates), "latency_s": statistics.median(one["latency_s"] for one in found), "rates": rates}


def trained(case: Case, steps: int, folder: Path) -> dict[str, Any]:
    """One run on a link of its own, with a plain connection on it before and behind."""
    folder.mkdir()
    FORKED.set_forkserver_preload([*PRELOADED, exposed_ranks.__name__])
    blocks, around, _ = units_of(case.shape)
    with price_ranks.slow_link(case.rate, BURST) as places:
        link = link_of(places, (blocks + around) // 2, folder)
        with Fleet(case.settings(folder, steps), folder, places, exposed_ranks.gathers) as fleet:
            outcome = fleet.wait(LIMIT_S)
            records = fleet.records()
    if outcome.status != "completed":
        raise RuntimeError(f"{case.name}: {outcome.reason}")
    notes = [json.loads(line) for path in folder.glob("steps-*") for line in path.read_text().splitlines()]
    counted = [one for one in notes if one["step"] >= WARM_STEPS]
    exposed = [statistics.fmean(ranks) for step, ranks in sorted(exposed_s(records).items()) if step >= WARM_STEPS and len(ranks) == WORLD]
    return {
        "exposed_s": exposed,
        "backward_s": [one["backward_s"] for one in counted],
        "gathered_bytes": sorted({one["gathered_bytes"] for one in counted}),
        "link": link,
    }


def measured(case: Case, steps: int, folder: Path) -> dict[str, Any]:
    run = trained(case, steps, folder)
    law_s, median_s = lawful_s(case, run["link"], statistics.median(run["backward_s"])), statistics.median(run["exposed_s"])
    figures = {
        f"fleet_{case.name}_exposed_s_median": median_s,
        f"law_{case.name}_exposed_s": law_s,
        f"law_over_fleet_{case.name}_ratio": law_s / median_s,
    }
    samples = {
        f"fleet_{case.name}_exposed_s": run["exposed_s"],
        f"fleet_{case.name}_backward_s": run["backward_s"],
        f"link_{case.name}_bytes_per_s": run["link"]["rates"],
    }
    told = f"{case.name}: {sum(units_of(case.shape)[:2]):,} bytes of parameters, {case.rate}, {run['gathered_bytes']} bytes gathered a step"
    return {"settings": {}, "figures": figures, "samples": samples, "notes": [told]}


def measure(form: Form) -> dict[str, Any]:
    """The exposed exchange of a sharded model's step, beside its law."""
    try:
        namespaces()
        program("tc")
    except pytest.skip.Exception as reason:
        return {"settings": {}, "figures": {}, "samples": {}, "notes": [left_out("_exposed_", str(reason))]}
    steps = form.of(20, 8, 1) + WARM_STEPS
    shapes = form.of(GROWN, GROWN, {"4mb": SMALLEST})
    with tempfile.TemporaryDirectory(prefix="exposed-") as folder:
        return together([measured(case, steps, Path(folder) / case.name) for case in cases(shapes)])


if __name__ == "__main__":
    harness.as_rank("benchmarks.exposed")
    harness.run("exposed", measure)

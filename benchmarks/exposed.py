"""`exposed`: how much of a step is exposed exchange, where parameters are kept in chunks, beside the law's answer.

The ranks train a model that ``fully_shard`` has cut. Each has a host of its own, which is a network namespace, so root is needed. Links
have a set rate, and are slow enough that the wire decides; a block's compute is a timed wait. The figure is the exposed exchange of a
step, as ranks record it. The law (:func:`fleet.laws.exchange.exposed_exchange`) gets the bytes of the model, and the times that forward
and backward computed. It also gets the rate and latency of a plain connection with both directions busy. The rate is the upper quartile,
as other load only lowers it.

Of two ranks without a copy, each gathers half of the model, twice a step. With a copy, a rank has the whole model, and gathers nothing. Of
four ranks with a copy, each gathers a half.

On fast links a step hides nearly all of its exchange. The rest is the work of processors, which the law does not have. So the figure is
its share of the step there.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import exposed_ranks, harness, price_ranks
from benchmarks.device_ranks import Block, Transformer
from benchmarks.harness import Form, left_out, on_the_way, together
from benchmarks.mesh import settings_of
from benchmarks.mesh_ranks import Shape
from benchmarks.placed import Fleet, Places
from fleet.laws.exchange import exposed_exchange, gathered_bytes, summed_bytes
from fleet.protocol.records import COMM, COMMIT, Committed, Record, Spans
from fleet.settings.run import RunSettings
from tests.support.plain import FORKED, PRELOADED
from tests.support.programs import namespaces, program

WARM_STEPS, LIMIT_S = 2, 240.0
BURST = "16kb"
"""Bytes that a link sends at once after a pause: little beside a unit."""


@dataclass(frozen=True)
class Case:
    """A run: its model, its links and its ranks.

    Attributes:
        wait_s: seconds that the forward of a block computes; its backward takes twice that.
    """

    name: str
    shape: Shape
    rate: str
    world: int
    copies: int
    wait_s: float

    def settings(self, folder: Path, steps: int) -> RunSettings:
        given = settings_of(self.shape, self.world, folder, steps=steps, wait_s=self.wait_s)
        return replace(given, optimizer_copies=self.copies, nodes=self.world)


SMALL, LARGE, SMALLEST = Shape(128, 5, 1), Shape(192, 6, 1), Shape(64, 2, 1)
LINKS = {"4mb": (SMALL, "40mbit", 0.04), "11mb": (LARGE, "100mbit", 0.04)}
"""Name of the size -> the model, the rate of links, and the seconds of a block's forward."""
SPREADS = {"4mb": ((2, 0), (2, 1), (4, 1)), "11mb": ((2, 0), (2, 1))}
"""Name of the size -> (ranks, copies) of each case."""
FAST = "1gbit"


def cases(form: Form) -> list[Case]:
    return [
        Case(f"{name}_{world}_ranks_{copies}_copies", form.of(shape, shape, SMALLEST), rate, world, copies, wait_s)
        for name, (shape, rate, wait_s) in list(LINKS.items())[: form.of(2, 1, 1)]
        for world, copies in SPREADS[name][: form.of(3, 3, 1)]
    ]


def fast_cases(form: Form) -> list[Case]:
    shape, _, wait_s = LINKS["11mb"]
    copies = (0, 1)[: form.of(2, 1, 1)]
    return [Case(f"11mb_{FAST}_2_ranks_{each}_copies", form.of(shape, shape, SMALLEST), FAST, 2, each, wait_s) for each in copies]


# ---- the law ---------------------------------------------------------------------------------------------------------------------------


def units_of(shape: Shape) -> tuple[int, int]:
    """(bytes of the blocks, bytes of the parameters around them, which stay gathered from forward to backward)."""
    model = Transformer(shape.width, shape.layers)
    whole = sum(one.nbytes for one in model.parameters())
    blocks = sum(one.nbytes for block in model.blocks if isinstance(block, Block) for one in block.parameters())
    return blocks, whole - blocks


def lawful_s(case: Case, link: dict[str, float], forward_s: float, backward_s: float) -> float:
    """The exposed exchange of a step by the law."""
    (blocks, around), world, copies = units_of(case.shape), case.world, case.copies
    found = exposed_exchange(
        forward_bytes=gathered_bytes(blocks + around, world, copies, 1),
        backward_bytes=gathered_bytes(blocks, world, copies, 1),
        sum_bytes=summed_bytes(blocks + around, world, copies),
        bytes_per_s=link["bytes_per_s"],
        latency_s=link["latency_s"],
        forward_s=forward_s,
        backward_s=backward_s,
        units=case.shape.layers,
        last_bytes=summed_bytes(around, world, copies),
        leave=True,
    )
    return found.total_s


# ---- the measurement -------------------------------------------------------------------------------------------------------------------


def exposed_s(records: Sequence[Record]) -> dict[int, list[float]]:
    """Committed step -> the exchange that each rank recorded, in seconds."""
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
    """Rate and latency of a plain connection between the first two hosts, in both directions at once; both ends' figures."""
    files = [folder / f"link-{number}" for number in range(2)]
    ends = [
        FORKED.Process(target=exposed_ranks.link_end, args=(place, places[1 - number].address, size, str(files[number])), daemon=True)
        for number, place in enumerate(places[:2])
    ]
    for end in ends:
        end.start()
    for end in ends:
        end.join(LIMIT_S)
    found = [json.loads(file.read_text()) for file in files]
    rates = [rate for one in found for rate in one["bytes_per_s"]]
    return {"latencies": [latency_s for one in found for latency_s in one["latency_s"]], "rates": rates}


def steps_s(records: Sequence[Record]) -> list[float]:
    """Seconds from each commit to the next one, as the coordinator has them."""
    at_s = [record.at_s for record in records if isinstance(record, Committed) and record.state.step > WARM_STEPS]
    return [later_s - earlier_s for earlier_s, later_s in itertools.pairwise(at_s)]


def trained(case: Case, steps: int, folder: Path) -> dict[str, Any]:
    """One run on links of its own, with a plain connection measured before and after it."""
    folder.mkdir()
    FORKED.set_forkserver_preload([*PRELOADED, exposed_ranks.__name__])
    made = price_ranks.slow_link(case.rate, BURST) if case.world == 2 else price_ranks.slow_links(case.world, case.rate, BURST)
    with made as places:
        links = [link_of(places, sum(units_of(case.shape)), folder)]
        with Fleet(case.settings(folder, steps), folder, places, exposed_ranks.gathers) as fleet:
            outcome = fleet.wait(LIMIT_S)
            records = fleet.records()
        links.append(link_of(places, sum(units_of(case.shape)), folder))
    if outcome.status != "completed":
        raise RuntimeError(f"{case.name}: {outcome.reason}")
    notes = [json.loads(line) for path in folder.glob("steps-*") for line in path.read_text().splitlines()]
    counted = [one for one in notes if one["step"] >= WARM_STEPS]
    found = sorted(exposed_s(records).items())
    rates, latencies = ([value for link in links for value in link[name]] for name in ("rates", "latencies"))
    return {
        "exposed_s": [statistics.fmean(ranks) for step, ranks in found if step >= WARM_STEPS and len(ranks) == case.world],
        "step_s": steps_s(records),
        "forward_s": [one["forward_s"] for one in counted],
        "backward_s": [one["backward_s"] for one in counted],
        "gathered_bytes": sorted({one["gathered_bytes"] for one in counted}),
        "link": {"rates": rates, "bytes_per_s": statistics.quantiles(rates, n=4)[2], "latency_s": statistics.median(latencies)},
    }


def measured(case: Case, steps: int, folder: Path) -> dict[str, Any]:
    """Law and measurement of one case."""
    run = trained(case, steps, folder)
    computed_s = (statistics.median(run[name]) for name in ("forward_s", "backward_s"))
    law_s, median_s = lawful_s(case, run["link"], *computed_s), statistics.median(run["exposed_s"])
    figures = {
        f"fleet_{case.name}_exposed_s_median": median_s,
        f"law_{case.name}_exposed_s": law_s,
        f"law_over_fleet_{case.name}_ratio": law_s / median_s,
    }
    samples = {
        f"fleet_{case.name}_exposed_s": run["exposed_s"],
        f"fleet_{case.name}_forward_s": run["forward_s"],
        f"fleet_{case.name}_backward_s": run["backward_s"],
        f"link_{case.name}_bytes_per_s": run["link"]["rates"],
    }
    return {"settings": {}, "figures": figures, "samples": samples, "notes": [_note(case, run)]}


def _note(case: Case, run: dict[str, Any]) -> str:
    return f"{case.name}: {sum(units_of(case.shape)):,} bytes of parameters, {case.rate}, {run['gathered_bytes']} bytes gathered a step"


def shared(case: Case, steps: int, folder: Path) -> dict[str, Any]:
    """The share of a step that is exposed exchange."""
    run = trained(case, steps, folder)
    figures = {f"fleet_{case.name}_exposed_over_step_ratio": statistics.median(run["exposed_s"]) / statistics.median(run["step_s"])}
    samples = {f"fleet_{case.name}_{name}": run[name] for name in ("exposed_s", "step_s")}
    samples[f"link_{case.name}_bytes_per_s"] = run["link"]["rates"]
    return {"settings": {}, "figures": figures, "samples": samples, "notes": [_note(case, run)]}


def with_error(found: dict[str, Any]) -> dict[str, Any]:
    """The law's largest deviation from the record of two ranks, as a share of it. In larger worlds some ranks wait for others' exchange."""
    ratios = [value for name, value in found["figures"].items() if name.startswith("law_over_fleet_") and "_2_ranks_" in name]
    return found | {"figures": {"law_error_2_ranks_ratio_max": max(abs(ratio - 1.0) for ratio in ratios), **found["figures"]}}


def measure(form: Form) -> dict[str, Any]:
    """Measure the exposed exchange of a sharded model's step, beside its law."""
    try:
        namespaces()
        program("tc")
    except pytest.skip.Exception as reason:
        return {"settings": {}, "figures": {}, "samples": {}, "notes": [left_out("law_", str(reason)), left_out("fleet_", str(reason))]}
    steps, chosen, fast = form.of(16, 6, 2) + WARM_STEPS, cases(form), fast_cases(form)
    here, everywhere = {one.name for one in (*chosen, *fast)}, (*cases(Form.FULL), *fast_cases(Form.FULL))
    missing = [left_out(f"_{case.name}_", f"not in the {form} form") for case in everywhere if case.name not in here]
    with tempfile.TemporaryDirectory(prefix="exposed-") as folder:
        way = on_the_way("exposed", chosen, lambda case: case.name)
        parts = [measured(case, steps, Path(folder) / case.name) for case in way]
        parts += [shared(case, steps, Path(folder) / case.name) for case in on_the_way("exposed", fast, lambda case: case.name)]
    return with_error(together([{"settings": {}, "figures": {}, "samples": {}, "notes": missing}, *parts]))


if __name__ == "__main__":
    harness.as_rank("benchmarks.exposed")
    harness.run("exposed", measure)

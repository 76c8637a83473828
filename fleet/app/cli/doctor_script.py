"""``fleet doctor --determinism SCRIPT`` and ``--shards SCRIPT``: a training script is tried on this machine, without a cluster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import pairs_of
from fleet.errors import ConfigError, FleetError
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from actors.rank.script import Script
    from fleet.ledger.sameness import Trial, TrialRequest
    from fleet.ledger.shard_prices import ShardPrice
    from fleet.settings.run import RunSettings
    from policies.determinism import DeterminismFinding, FormCost

ROUNDS = 7
"""Steps of each number of shards that count, in turns; one more before that does not."""
MOST_CALLS = 4


def settings_of(values: Mapping[str, Any]) -> RunSettings:
    """Settings of a run of the script. Raises ConfigError."""
    from fleet.app.configuration import configured

    layers = [Path(each) if Path(each).is_file() else each for each in values["config"] or []]
    found = configured(*layers, over={} if values["world"] is None else {"world": values["world"]}).run
    return dataclasses.replace(found, options={**found.options, **pairs_of(values["set_"] or [], "--set")})


# ---- determinism -------------------------------------------------------------------------------------------------------------------------


def examine_determinism(script: str, values: Mapping[str, Any], as_json: bool) -> int:
    """Try the script, tell what differs, and return the exit code. Raises ConfigError, and FleetError where the script raises."""
    from actors.rank.script_loading import found as found_script
    from actors.script_trials import InProcesses
    from policies.determinism import examine, priced

    settings, terminal = settings_of(values), cli_print.Terminal(stderr=True)
    trials = InProcesses(found_script(script, values["arguments"] or (), values["module"]), settings)
    tried: list[Trial] = []

    def run(asked: TrialRequest) -> Trial:
        if not as_json:
            terminal.print(f"trial {len(tried) + 1}: {_in_words(asked)}", style="dim")
        tried.append(trials(asked))
        return tried[-1]

    found = [priced(one, run) for one in examine(run)]
    if not found and tried[0].error:
        raise FleetError(tried[0].error)
    steps = len({mark.step for mark in tried[0].marks if mark.step >= 0})
    if as_json:
        answer = {"script": script, "clean": not found, "trials": len(tried), "findings": list(map(dataclasses.asdict, found))}
        cli_print.write(json.dumps(answer, indent=2))
    else:
        cli_print.write("\n\n".join(_report(script, one) for one in found) if found else _clean(script, steps, settings.shards, len(tried)))
    return Exit.FAILED if found else Exit.DONE


def _in_words(asked: TrialRequest) -> str:
    from fleet.ledger.sameness import FORMS

    said = [", ".join(sorted(asked.varied)) + " varied" if asked.varied else "nothing varied"]
    said += ["what the script keeps"] * (asked.at is not None)
    said += [f"operations of {asked.inside}"] * bool(asked.inside) + ["timed"] * asked.timed
    said += [f"with {FORMS[asked.form]}"] if asked.form else []
    return ", ".join(said)


def _clean(script: str, steps: int, shards: int, trials: int) -> str:
    from fleet.ledger.sameness import VARIED

    varied = "".join(f"\n  - {words}" for words in VARIED.values())
    return f"{script}: the same bits in each of {trials} trials of {steps} steps with {shards} shards, also where{varied}"


def _report(script: str, found: DeterminismFinding) -> str:
    """In the form of a ConfigError: the field, its value, the reason and the way out."""
    error = ConfigError(f"{script}: {found.place}", found.what, f"it differs {_when(found.varied)}: {found.reason}", found.way_out)
    lines = [str(error)]
    if found.operation:
        lines.append(f"  operation: {found.operation}")
    lines += [f"  kept otherwise: {kept.what} at {kept.line}" for kept in found.kept[:MOST_CALLS]]
    lines += [f"  asked for: {call.what} at {call.line}" for call in found.calls[:MOST_CALLS]]
    if found.cost is not None:
        lines.append(f"  cost: {_cost(found.cost, found.place)}")
    return "\n".join(lines)


def _when(varied: str) -> str:
    from fleet.ledger.sameness import VARIED
    from policies.determinism import AGAIN, TOGETHER, WROTE

    words = {
        AGAIN: "from one trial to the next, with nothing changed",
        TOGETHER: "when all is changed at once",
        WROTE: "from shard to shard",
    }
    return words[varied] if varied in words else f"when {VARIED[varied]}"


def _cost(cost: FormCost, place: str) -> str:
    from fleet.ledger.sameness import FORMS

    module = f", {_ms(cost.module_s)} of it in {place}" if cost.module_s else ""
    if not cost.holds:
        return f"a step takes {_ms(cost.step_s)} as it is{module}; there is no form to switch on, so time it again once it is changed"
    formed = f", {_ms(cost.form_module_s)} of it in {place}" if cost.form_module_s else ""
    form = f"{_ms(cost.form_step_s)} with {FORMS[cost.form]}{formed}"
    return f"a step takes {_ms(cost.step_s)} as it is{module}, and {form}; with that it is the same"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


# ---- shards ------------------------------------------------------------------------------------------------------------------------------


def examine_shards(script: str, values: Mapping[str, Any], as_json: bool) -> int:
    """Time steps of the script with each number of shards, tell it, and return the exit code. Raises as the above."""
    settings = settings_of({**values, "world": None})
    world = 1 if values["world"] is None else values["world"]
    from actors.rank.script_loading import found as found_script

    if world < 1:
        raise ConfigError("--world", world, "a run has at least one rank", "The nearest valid value is 1.")
    batch_size, found = measured(found_script(script, values["arguments"] or (), values["module"]), settings, world)
    if as_json:
        answer = {
            "script": script,
            "world": world,
            "batch_size": batch_size,
            "rounds": ROUNDS,
            "prices": [dataclasses.asdict(one) for one in found],
        }
        cli_print.write(json.dumps(answer, indent=2))
    else:
        _table(found, world, batch_size)
    return Exit.DONE


def measured(script: Script, settings: RunSettings, world: int) -> tuple[int, list[ShardPrice]]:
    """(samples of the batch, what each number of shards costs). One process for each number, which take steps in turns."""
    from actors.script_trials import Stepping
    from fleet.ledger.shard_prices import candidates, prices

    ranks = [Stepping(script, settings, world, world)]
    try:
        batch_size = ranks[0].step().batch_size
        ranks += [Stepping(script, settings, world, shards) for shards in candidates(world, batch_size)[1:]]
        for rank in ranks[1:]:
            rank.step()
        rounds = [[rank.step() for rank in ranks] for _ in range(ROUNDS)]
    finally:
        for rank in ranks:
            rank.close()
    taken = {rank.shards: steps for rank, steps in zip(ranks, zip(*rounds, strict=True), strict=True)}
    rows = [
        (shards, [one.seconds for one in steps], [one.looked_s for one in steps], steps[-1].peak_bytes, steps[-1].before_bytes)
        for shards, steps in taken.items()
    ]
    return batch_size, prices(world, batch_size, rows)


def _table(found: Sequence[ShardPrice], world: int, batch_size: int) -> None:
    heads = ("--shards", "of a rank", "samples in each", "step", "times", "memory", "of the step", "worlds up to")
    rows = [
        (
            str(one.shards), str(one.per_rank), str(one.samples), _ms(one.step_s), f"{one.times:.2f}", _mib(one.peak_bytes),
            _mib(one.step_bytes), str(one.shards),
        )
        for one in found
    ]  # fmt: skip
    part = f"The part of one rank of {world} in" if world > 1 else "One rank takes"
    cli_print.write(*cli_print.table(heads, rows), f"{part} a step of {batch_size} samples: medians of {ROUNDS} steps of each, in turns.")
    if any(one.first_pass_s for one in found):
        said = ", ".join(f"{_ms(one.first_pass_s)} with {one.shards}" for one in found)
        cli_print.write(f"step.gather has each shard computed twice. Of a step its first pass, without gradients, takes {said} shards.")


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"

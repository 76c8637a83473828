"""``fleet experiment rehearse``: a large fleet's goodput predicted, and a scale model of it run for real. Heavy imports wait until then."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import KEYS, RUNS, option_of
from fleet.app.cli.json_out import Json, write_json
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from chaos.settings import ChaosSettings
    from fleet.app.cluster.local import LocalCluster
    from fleet.app.recipes import LiveRun
    from fleet.app.rehearsal import Constants, Rehearsal, RehearsalPrediction
    from fleet.app.scenarios import Prepared
    from fleet.planning.traces.faults import FittedFaults
    from fleet.protocol.records import Record
    from fleet.settings.run import RunSettings

PLAN, SCENARIO = "fleet.planning.inputs:PlanInput", "fleet.app.scenarios:Scenario"
CALIBRATION_GAP_S = 8.0
"""From one loss of the calibration to the next: as a rule the world is full again by then."""
CALIBRATION_TAIL_S = 15.0
RESTART_S = 2.5
"""A restart of all is over by then, as a rule."""
SAVES_S = 0.15
"""From one checkpoint of the calibration to the next, where all restart: in the run they will be as frequent."""
FIRST_LOSS_S = 3.0
POLL_S = 0.1
FAULTS = 10
"""Faults of the small run, where nothing else is said."""


def rehearse(
    gpus: Annotated[int, option_of(PLAN, "gpus", "GPUs of the fleet that is rehearsed.")],
    days: Annotated[float, option_of(SCENARIO, "days", "Length of its run.")],
    recovery: Annotated[str, option_of(PLAN, "recovery", "in-place, or restart of all ranks.")],
    faults: Annotated[
        list[str] | None,
        typer.Option(
            help="Faults of the small run, about; or a file of fleet experiment fit: what strikes the fleet. Repeatable.",
            show_default=str(FAULTS),
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="How long the small run may take, start-up and calibration not counted.")] = 4.0,
    mtbf_s: Annotated[float, typer.Option(help="Time between faults of the small run; 0: chosen.")] = 0.0,
    world: Annotated[int, typer.Option(help="Ranks of the small run.")] = KEYS["world"].default,
    losses: Annotated[int, typer.Option(help="Ranks that are killed to calibrate.")] = 4,
    seed: Annotated[int, typer.Option(help="Of faults and predictions.")] = 0,
    storage: Annotated[str, typer.Option(help="Folder for the runs and the frozen prediction.")] = RUNS,
    json_: Json = "",
) -> None:
    """Run a scale model of a fleet under faults, with the prediction written down before the first of them."""
    from fleet.app import plans, recipes
    from fleet.app.rehearsal import Rehearsal, target_of
    from fleet.ledger.checkers import VIOLATED

    count, seen = said_of_faults(faults or [])
    check(count, minutes, mtbf_s, world, losses)
    target = target_of(gpus, days, recovery, seen=seen)
    folder = Path(storage).resolve() / plans.new_name("rehearsal")
    base = settings_of(world, recovery, seed)
    with recipes.local_cluster(base) as cluster:
        found = Rehearsal(
            gpus=gpus, days=days, recovery=recovery,
            **carry_out(cluster, target, base, folder, faults=count, budget_s=60 * minutes, mtbf_s=mtbf_s, losses=losses),
        )  # fmt: skip
    write_json(found.to_dict(), json_)
    if json_ != "-":
        _show(found, folder)
    if any(one.verdict == VIOLATED for one in found.measured.checks):
        raise typer.Exit(Exit.VIOLATED)


def said_of_faults(words: Sequence[str]) -> tuple[int, FittedFaults | None]:
    """(faults of the small run, rates of the fleet's faults; None: the catalogue's). Raises ConfigError."""
    from fleet.errors import ConfigError
    from fleet.planning.traces.faults import load_faults

    counts = [word for word in words if word.lstrip("-").isdigit()]
    files = [word for word in words if word not in counts]
    for same in (counts, files):
        if len(same) > 1:
            raise ConfigError("--faults", same[1], f"contradicts {same[0]}", "Give one number and one file at most.")
    return int(counts[0]) if counts else FAULTS, load_faults(files[0]) if files else None


def check(faults: int, minutes: float, mtbf_s: float, world: int, losses: int) -> None:
    """Refuse impossible rehearsals before a process starts. Raises ConfigError."""
    from fleet.errors import ConfigError

    if world < 2:
        raise ConfigError("world", world, "a rank is killed, and another must go on", "The nearest valid value is 2.")
    if losses < 1:
        raise ConfigError("losses", losses, "the cost of a loss is measured on at least one", "The nearest valid value is 1.")
    if faults < 1:
        raise ConfigError("faults", faults, "a run without faults rehearses nothing", "The nearest valid value is 1.")
    if not 0 < minutes < math.inf:
        raise ConfigError("minutes", minutes, "must be greater than 0 min, and finite", "4 is the default.")
    if not 0 <= mtbf_s < math.inf:
        raise ConfigError("mtbf_s", mtbf_s, "must be at least 0 s, and finite", "0 chooses it.")


def settings_of(world: int, recovery: str, seed: int, **changes: Any) -> RunSettings:
    """Settings of the small run. All its faults are injected: no number of losses is a crash loop, and no rank is called slow."""
    from fleet.settings.run import Budgets, RecoverySettings, RunSettings, StragglerSettings

    plenty = Budgets(slot=10**7, total=10**6)
    return RunSettings(
        world=world, nodes=min(2, world), shards=16, peer_copies=0, seed=seed, recovery=RecoverySettings(policy=recovery), budgets=plenty,
        straggler=StragglerSettings(enabled=False), **changes,
    )  # fmt: skip


def carry_out(
    cluster: LocalCluster, target: Prepared, base: RunSettings, folder: Path, *, faults: int, budget_s: float, mtbf_s: float = 0.0,
    losses: int = 2,
) -> dict[str, Any]:  # fmt: skip
    """Calibrate, choose the scale, freeze the prediction, run. ``prediction``, ``measured`` and ``hindsight`` of a ``Rehearsal``."""
    from fleet.app.rehearsal import chaos_of, choose, constants, goodput_of_run, measured, predict
    from fleet.host.journal import read_journal

    real = _calibrated(cluster, base, folder / "calibration", losses, mtbf_s)
    scale = choose(target, real, base.world, base.recovery.policy, faults, budget_s, mtbf_s)
    chaos = chaos_of(scale, base.seed)
    planned = chaos.plan(seed=base.seed, world=base.slots, nodes=base.nodes)
    prediction = predict(target, real, scale, planned, base.world, base.recovery.policy, base.seed)
    _freeze(prediction, folder / "prediction.json")
    chosen = dataclasses.replace(base, form_delay_s=scale.delay_s, options={"wait_s": str(scale.wait_s)})
    _train(cluster, chosen, chaos, folder / "run", lambda records: False, scale.duration_s)
    records = list(read_journal(folder / "run" / "journal.jsonl"))
    own = constants(records, scale.delay_s, otherwise=real)
    hindsight, _, _ = goodput_of_run(own, scale, planned, base.world, base.recovery.policy, base.seed, drift=0.0)
    return {"prediction": prediction, "measured": measured(records), "hindsight": hindsight}


def _calibrated(cluster: LocalCluster, base: RunSettings, folder: Path, losses: int, gap_s: float) -> Constants:
    """The cost of a loss on this machine: ``losses`` ranks are killed, and the run goes on until the world is full again."""
    from chaos.arrivals import save_trace
    from chaos.settings import ChaosSettings
    from fleet.app.rehearsal import LEAST_STEP_S, WORK_S, constants, recovered
    from fleet.host.journal import read_journal
    from fleet.protocol.types import Fault
    from fleet.settings.run import CheckpointSettings

    folder.mkdir(parents=True)
    at_s = [FIRST_LOSS_S + gone_s for gone_s in itertools.accumulate(gaps_s(base, gap_s, losses))]
    kills = [Fault(f"calibration-{n}", at_s[n], "gpu", "kill_rank", slot=1 + n % (base.world - 1)) for n in range(losses)]
    save_trace(kills, folder / "kills.csv")
    checkpoint = CheckpointSettings(policy="fixed", interval_s=SAVES_S) if base.recovery.policy == "restart" else base.checkpoint
    waits = {"wait_s": str(LEAST_STEP_S - WORK_S)}  # as busy as the run will be, as a rule
    settings = dataclasses.replace(base, options=waits, checkpoint=checkpoint)
    chaos = ChaosSettings(trace=str(folder / "kills.csv"))
    _train(cluster, settings, chaos, folder, lambda records: recovered(records, losses), at_s[-1] + CALIBRATION_TAIL_S)
    return constants(read_journal(folder / "journal.jsonl"))


def gaps_s(base: RunSettings, gap_s: float, losses: int) -> Sequence[float]:
    """Seconds between losses, distributed as in the run: two replacements at once take longer than one after the other.

    A restart is over before the next one: a fault that is due within it has no rank to strike. A few drawn gaps could hold hardly any
    short ones. So the gaps are the exponential law's own quantiles, in an order by the seed.
    """
    import numpy as np

    from fleet.simulation.rng import derive_seed

    rng = np.random.Generator(np.random.PCG64(derive_seed(base.seed, "calibration")))
    least_s = RESTART_S if base.recovery.policy == "restart" else 0.0
    quantiles = -np.log1p(-(np.arange(losses) + 0.5) / losses)
    return [max(least_s, float(gap)) for gap in rng.permutation(quantiles / quantiles.mean()) * (gap_s or CALIBRATION_GAP_S)]


def _freeze(prediction: RehearsalPrediction, path: Path) -> None:
    """Written down, and not to be written again."""
    path.write_text(json.dumps(dataclasses.asdict(prediction), indent=2) + "\n")
    path.chmod(0o444)


def _train(
    cluster: LocalCluster, settings: RunSettings, chaos: ChaosSettings, folder: Path, enough: Callable[[list[Record]], bool], limit_s: float
) -> None:  # fmt: skip
    """A run through ``fleet run``'s own machinery, stopped when its journal says ``enough``, or ``limit_s`` after its first view."""
    from actors.rank.rehearsed import train
    from fleet.app.plans import RunPlan
    from fleet.app.recipes import LiveRun
    from fleet.errors import RunFailed

    plan = RunPlan(name=f"{folder.parent.name}-{folder.name}", folder=folder, settings=settings, train=train, chaos=chaos)
    live, over = LiveRun(plan, cluster), threading.Event()
    watch = threading.Thread(target=_stop_when, args=(live, plan.journal, enough, limit_s, over), name="fleet-rehearsal", daemon=True)
    watch.start()
    try:
        result = live.execute()
    finally:
        over.set()
        watch.join()
    if result.status == "failed":
        raise RunFailed(result.reason, result.detail)


def _stop_when(live: LiveRun, journal: Path, enough: Callable[[list[Record]], bool], limit_s: float, over: threading.Event) -> None:
    from fleet.host.journal import JournalTail
    from fleet.protocol.records import Spans, ViewPublished

    tail, records, first_s = JournalTail(journal), list[Any](), math.inf
    while not over.wait(POLL_S):
        records += [record for record in tail.poll() if not isinstance(record, Spans)]
        if first_s == math.inf and any(isinstance(record, ViewPublished) for record in records):
            first_s = time.monotonic()
        if time.monotonic() - first_s >= limit_s or (records and enough(records)):
            live.stop("the rehearsal is over")
            return


# ---- tables ------------------------------------------------------------------------------------------------------------------------------


def _show(found: Rehearsal, folder: Path) -> None:
    from fleet.app.rehearsal import reasons, rows

    scale = found.prediction.scale
    fleet = f"{found.gpus:,} GPUs for {found.days:g} days, recovery {found.recovery}"
    cli_print.write(f"{fleet}: time runs {scale.compression:,.0f} times faster here, a fault every {scale.mtbf_s:.1f} s", "")
    cli_print.write(*cli_print.table(("goodput of", "value", "interval"), rows(found)), "")
    groups = [(group.name, f"{group.target:.3g}", f"{group.real:.3g}", group.verdict, group.why) for group in scale.groups]
    cli_print.write(*cli_print.table(("ratio, over the time between faults", "fleet", "here", "", "why"), groups), "", *reasons(found))
    cli_print.write(*(f"{one.verdict} {one.check}: {one.reason}" for one in found.measured.checks))
    cli_print.write(f"the prediction was frozen before the first fault: {folder / 'prediction.json'}, seal {found.prediction.seal[:16]}")

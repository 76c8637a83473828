"""The three boards that people look at: one run, all runs, cost. What is seen without scrolling says whether it is well, what it costs,
and what is wrong."""

from __future__ import annotations

from dashboards.grafana.parts import (
    ABOVE,
    BARS,
    BELOW,
    COUNT,
    KG,
    KWH,
    NUMBER,
    RUN,
    SECONDS,
    SHARE,
    USD,
    Board,
    Limit,
    Panel,
    bars,
    lines,
    now,
)
from dashboards.metrics.rules import RUNNING, STEPS
from fleet.protocol.records import FLOPS, PEAK, TOKENS

WELL, COSTS, WRONG = "Is it well?", "What does it cost?", "What is wrong?"
HALF, LATE_S, FEW = Limit(BELOW, 0.5), Limit(ABOVE, 120.0), Limit(BELOW, 0.1)
ANY = Limit(ABOVE, 1.0)
NO_PRICE, NO_COUNT, NO_BUDGET = "nobody says", "not counted", "no budget"
LOST = f'category!~"{STEPS}"'
FIRING = 'alertstate="firing",alertname=~"Fleet.*"'
NONE = 'or on () label_replace(vector(0), "alertname", "none", "", "")'
"""With no alert there is a bar without length, and not a panel that could be broken."""


def _of_run(metric: str, *more: str) -> str:
    return f"{metric}{{{','.join((RUN, *more))}}}"


def _per_million_tokens(metric: str) -> str:
    tokens = _of_run("fleet_measurement", f'name="{TOKENS}"')
    return f"1e6 * {_of_run(metric)} / on (run) ({_of_run('fleet_step')} * on (run) {tokens} > 0)"


def _per_step(metric: str) -> str:
    return f"{_of_run(metric)} / ({_of_run('fleet_step')} > 0)"


def _trouble(
    title: str,
    question: str,
    *queries: tuple[str, str],
    unit: str = COUNT,
    kind: str = BARS,
    width: int = 8,
    bad: Limit = ANY,
    opens: str = "",
) -> Panel:
    """What is wrong, red where it is."""
    return Panel(title, question, queries, unit, kind, width, height=6, bad=bad, opens=opens)


INJECTED = _of_run("fleet_faults_total", 'phase="executed"')
LEFT = f"{_of_run('fleet_budget_usd')} - {_of_run('fleet_spent_usd')}"
USD_LOST = Panel(
    "USD lost",
    "What of it did not become steps that are kept, and what of that did faults take?",
    ((f"sum({_of_run('fleet_cost_usd_total', LOST)})", "in all"), (f"sum({_of_run('fleet_fault_cost_usd')})", "to faults")),
    USD,
    NUMBER,
    4,
    empty=NO_PRICE,
)
SPENT = (
    now("USD", "What has it cost so far?", _of_run("fleet_spent_usd"), USD, empty=NO_PRICE),
    USD_LOST,
    now("kWh", "How much energy has it taken?", _of_run("fleet_spent_kwh"), KWH, empty=NO_PRICE),
    now("kg CO2", "What has it emitted?", _of_run("fleet_emitted_kg"), KG, empty=NO_PRICE),
)

ONE_RUN = Board(
    "fleet-run",
    "Fleet: one run",
    links=("fleet-overview", "fleet-cost", "fleet-details"),
    rows={
        WELL: (
            now("Goodput", "How much of the run is training?", _of_run("fleet_goodput_ratio"), SHARE, bad=HALF),
            now("Predicted", "And how much should be, with the faults that came?", _of_run("fleet_predicted_goodput_ratio"), SHARE),
            now("MFU", "How much of the peak do kept steps use?", _of_run("fleet_factor_ratio", 'factor="program"'), SHARE, empty=NO_COUNT),
            now("Tokens a second", "How fast is it?", _of_run("fleet_tokens_per_second"), empty=NO_COUNT),
            now("Step", "How far is it?", _of_run("fleet_step")),
            now(
                "Since the newest commit",
                "Does it make progress?",
                f"time() - {_of_run('fleet_commit_timestamp_seconds')}",
                SECONDS,
                bad=LATE_S,
            ),
        ),
        COSTS: (
            *SPENT,
            now("USD for a million tokens", "What does progress cost?", _per_million_tokens("fleet_spent_usd"), USD, empty=NO_COUNT),
            now("Budget left", "May it go on?", f"({LEFT}) / {_of_run('fleet_budget_usd')}", SHARE, bad=FEW, empty=NO_BUDGET),
        ),
        WRONG: (
            _trouble(
                "Alerts",
                "Which alert of this run fires?",
                (f"sum by (alertname) ({_of_run('ALERTS', FIRING)}) {NONE}", "{{alertname}}"),
            ),
            _trouble(
                "In the last 15 minutes",
                "Which faults struck, and how many processes were lost?",
                (f"round(sum by (kind) (increase({INJECTED}[15m]))) > 0", "{{kind}}"),
                (f"round(increase({_of_run('fleet_losses_total')}[15m]))", "processes lost"),
            ),
            _trouble(
                "Ranks that do not train",
                "Is the world as large as it should be?",
                (f"{_of_run('fleet_world_size')} - {_of_run('fleet_view_size')}", ""),
                kind=NUMBER,
                width=4,
            ),
            _trouble(
                "Steps rolled back",
                "How much was done in vain?",
                (_of_run("fleet_steps_rolled_back_total"), ""),
                kind=NUMBER,
                width=4,
            ),
        ),
        "Where does the time go?": (
            bars(
                "Goodput waterfall",
                "What of all rank-seconds went where?",
                SECONDS,
                (f"sort_desc({_of_run('fleet_rank_seconds_total')} > 0)", "{{category}}"),
            ),
            lines(
                "The ledger over time",
                "And when?",
                COUNT,
                (f"rate({_of_run('fleet_rank_seconds_total')}[$__rate_interval])", "{{category}}"),
                stacked=True,
            ),
            lines(
                "Goodput over time",
                "Is it getting better, and what is to be expected?",
                SHARE,
                (_of_run("fleet_goodput_ratio"), "since the start"),
                (_of_run("fleet:goodput:ratio_rate5m"), "last five minutes"),
                (_of_run("fleet_forecast_goodput_ratio", 'bound="mean"'), "ahead"),
            ),
            lines(
                "What a step is made of",
                "Which term of the Fleet Law to attack?",
                SECONDS,
                (_of_run("fleet_step_part_seconds"), "{{term}}"),
                stacked=True,
            ),
            bars(
                "Predicted beside measured loss",
                "Does each cause cost what it should?",
                SHARE,
                (_of_run("fleet_predicted_loss_ratio"), "{{term}}, predicted"),
                (_of_run("fleet_measured_loss_ratio"), "{{term}}, measured"),
            ),
            lines(
                "What the program reports",
                "Does it learn?",
                COUNT,
                (_of_run("fleet_measurement", f'name!~"{TOKENS}|{FLOPS}|{PEAK}"'), "{{name}}"),
            ),
        ),
    },
)

ALL_RUNS = Board(
    "fleet-overview",
    "Fleet: all runs",
    of_a_run=False,
    links=("fleet-run", "fleet-cost"),
    rows={
        WELL: (
            now("Runs", "How many runs go on?", 'count(fleet_run_info{status="running"}) or vector(0)'),
            now(
                "Goodput",
                "How much of all that is paid for is training?",
                f"sum((fleet_goodput_ratio * fleet_world_size) {RUNNING}) / sum(fleet_world_size {RUNNING})",
                SHARE,
                bad=HALF,
            ),
            now("Ranks", "How many ranks train?", f"sum(fleet_view_size {RUNNING}) or vector(0)"),
            now("Spares", "How many may fail now?", f"sum(fleet_spares {RUNNING}) or vector(0)"),
            now("Tokens a second", "How fast are they, all together?", f"sum(fleet_tokens_per_second {RUNNING})", empty=NO_COUNT),
            now("Steps a second", "And in steps?", "sum(rate(fleet_steps_committed_total[$__rate_interval]))"),
        ),
        COSTS: (
            now("USD", "What have these runs cost so far?", "sum(fleet_spent_usd)", USD, empty=NO_PRICE),
            now(
                "USD an hour",
                "And what do they cost now?",
                f"3600 * sum(fleet_spent_usd / fleet_wall_seconds {RUNNING})",
                USD,
                empty=NO_PRICE,
            ),
            now("USD lost", "What of it did not become steps that are kept?", f"sum(fleet_cost_usd_total{{{LOST}}})", USD, empty=NO_PRICE),
            now("USD of faults", "And what of that did faults take?", "sum(fleet_fault_cost_usd)", USD, empty=NO_PRICE),
            now("kWh", "How much energy have they taken?", "sum(fleet_spent_kwh)", KWH, empty=NO_PRICE),
            now("kg CO2", "What have they emitted?", "sum(fleet_emitted_kg)", KG, empty=NO_PRICE),
        ),
        WRONG: (
            _trouble(
                "Alerts",
                "Which alert fires, and of which run?",
                (f"sum by (run, alertname) (ALERTS{{{FIRING}}}) {NONE}", "{{run}} {{alertname}}"),
                opens="fleet-run",
            ),
            _trouble(
                "Ranks that do not train",
                "Whose world is smaller than it should be?",
                (f"(fleet_world_size - fleet_view_size) {RUNNING}", "{{run}}"),
                opens="fleet-run",
            ),
            _trouble(
                "Goodput of each run now",
                "Which run loses time?",
                ("sort(fleet_goodput_ratio)", "{{run}}"),
                unit=SHARE,
                bad=HALF,
                opens="fleet-run",
            ),
        ),
        "Over time": (
            Panel("Goodput of each run", "Since when?", (("fleet_goodput_ratio", "{{run}}"),), SHARE, opens="fleet-run"),
            lines("Goodput in the last five minutes", "Which run loses time now?", SHARE, ("fleet:goodput:ratio_rate5m", "{{run}}")),
            lines("Processes lost", "How often does something break?", COUNT, ("fleet_losses_total", "{{run}}")),
            lines("USD of each run", "Which run costs what?", USD, ("fleet_spent_usd", "{{run}}")),
        ),
    },
)

COST = Board(
    "fleet-cost",
    "Fleet: cost",
    links=("fleet-run", "fleet-overview"),
    rows={
        COSTS: (
            *SPENT,
            now("Budget left", "How much may it still cost?", LEFT, USD, empty=NO_BUDGET),
            now(
                "Budget lasts for",
                "And for how long, at what it costs now?",
                f"({LEFT}) / ({_of_run('fleet_spent_usd')} / {_of_run('fleet_wall_seconds')})",
                SECONDS,
                empty=NO_BUDGET,
            ),
        ),
        "What does progress cost?": (
            now("USD for a million tokens", "In money?", _per_million_tokens("fleet_spent_usd"), USD, empty=NO_COUNT),
            now("kWh for a million tokens", "In energy?", _per_million_tokens("fleet_spent_kwh"), KWH, empty=NO_COUNT),
            now("kg CO2 for a million tokens", "In carbon?", _per_million_tokens("fleet_emitted_kg"), KG, empty=NO_COUNT),
            now("USD for a kept step", "And a step, in money?", _per_step("fleet_spent_usd"), USD, empty=NO_PRICE),
            now("kWh for a kept step", "In energy?", _per_step("fleet_spent_kwh"), KWH, empty=NO_PRICE),
            now("kg CO2 for a kept step", "In carbon?", _per_step("fleet_emitted_kg"), KG, empty=NO_PRICE),
        ),
        "How much of it is used?": tuple(
            Panel(title, question, ((_of_run("fleet_factor_ratio", f'factor="{factor}"'), ""),), SHARE, NUMBER, 6, empty=NO_COUNT)
            for title, factor, question in (
                ("Scheduling", "scheduling", "How much of what was held did the world have?"),
                ("x runtime", "runtime", "How much of that became steps that are kept?"),
                ("x program (MFU)", "program", "How much of the device's peak did these use?"),
                ("= goodput of all that is paid for", "product", "What comes of all that is paid for?"),
            )
        ),
        "What is it spent on?": tuple(
            bars(
                f"{title} by category", f"{question} go?", unit, (f"sort_desc({_of_run(metric)} > 0)", "{{category}}"),
                width=8, empty=NO_PRICE,
            )
            for title, metric, unit, question in (
                ("USD", "fleet_cost_usd_total", USD, "Where does the money"),
                ("kWh", "fleet_energy_kwh_total", KWH, "Where does the energy"),
                ("kg CO2", "fleet_emissions_kg_total", KG, "Where do the emissions"),
            )
        ),
        "What do faults cost?": tuple(
            bars(f"{title} by kind of fault", question, unit, (f"sort_desc({_of_run(metric)})", "{{kind}}"), width=8, empty="nothing")
            for title, metric, unit, question in (
                ("USD", "fleet_fault_cost_usd", USD, "Which kind of fault costs most?"),
                ("kWh", "fleet_fault_energy_kwh", KWH, "And in energy?"),
                ("kg CO2", "fleet_fault_emissions_kg", KG, "And in carbon?"),
            )
        ),
        "Over time": (
            lines(
                "USD and its budget",
                "When is it spent?",
                USD,
                (_of_run("fleet_spent_usd"), "so far"),
                (_of_run("fleet_budget_usd"), "budget"),
                (_of_run("fleet_store_cost_usd"), "of it for the store"),
                (f"sum({_of_run('fleet_cost_usd_total', LOST)})", "lost"),
            ),
            lines("Factors", "What got better, what got worse?", SHARE, (_of_run("fleet_factor_ratio"), "{{factor}}")),
        ),
    },
)  # fmt: skip

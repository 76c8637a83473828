"""A plan in words and figures, the same for the table and for the page."""

from __future__ import annotations

from fleet.planning.kept import in_words, laws_of
from fleet.planning.plan import FleetPlan, days
from fleet.planning.sweep import Point

Rows = list[tuple[str, ...]]

TIER_NAMES = {"replicas": "replicas in other ranks", "local": "disks of the nodes", "object": "object store"}


def sections(plan: FleetPlan) -> list[tuple[str, Rows]]:
    """(title, rows of cells) from the question to the bill."""
    return [("The fleet", _fleet(plan)), ("One step", _step(plan)), ("Faults", _faults(plan)), ("Ways back", _tiers(plan)),
            ("The run", _run(plan))]  # fmt: skip


def _fleet(plan: FleetPlan) -> Rows:
    asked, step, mapping = plan.asked, plan.step, plan.step.mapping
    word = "fits" if step.fits else "does not fit"
    memory = f"{step.memory.total_bytes / 1e9:.1f} of {step.usable_bytes / 1e9:.1f} GB"
    parts = ((step.memory.weights, "weights"), (step.memory.gradients, "gradients"), (step.memory.optimizer, "optimizer"),
             (step.memory.activations, "activations"), (step.memory.gathered, "units gathered"))  # fmt: skip
    return [
        (
            "model",
            asked.model,
            f"{asked.what.parameters / 1e9:,.1f} B parameters on {asked.gpus:,} {asked.hardware}, {asked.nodes:,} nodes",
        ),
        (
            "mapping",
            f"{mapping.tensor} x {mapping.pipeline} x {mapping.data}",
            f"tensor x pipeline x data; {in_words(asked, mapping.data)}",
        ),
        ("memory of a GPU", memory, f"{word}: " + ", ".join(f"{size / 1e9:.1f} {name}" for size, name in parts if size)),
        ("by the law", *next(iter(laws_of(asked).items()))),
    ]


def _step(plan: FleetPlan) -> Rows:
    step = plan.step
    rows: Rows = [("step", days(step.step_s), f"{step.tokens:,.0f} tokens, MFU {step.mfu:.1%}, {step.tokens_per_s:,.0f} tokens/s")]
    rows += [(name, f"{share:.1%}", "") for name, share in step.shares.items() if share > 0.0005]
    if plan.asked.whole:
        law, source = list(laws_of(plan.asked).items())[-1]
        parts = f"gathers {days(step.gather_s)}, sums {days(step.data_s)}, {days(step.hidden_s)} hidden"
        rows.append(("exposed exchange", days(step.gather_s + step.data_s), f"{parts}; by the law {law}: {source}"))
    return [*rows, ("term to attack", plan.attack, "of the Fleet Law: the largest one beside computing")]


def _faults(plan: FleetPlan) -> Rows:
    faults = plan.faults
    rows: Rows = [
        ("a fault every", days(faults.mtbf_s), f"{plan.bill.faults:,.0f} in the run"),
        ("goodput", f"{faults.goodput:.2%}", f"expected, with recovery {plan.asked.recovery}"),
    ]
    rows += [(f"lost to {name}", f"{share:.2%}", "") for name, share in faults.losses.items() if share >= 5e-5]
    short = f"more nodes are down for {faults.short_probability:.2%} of the time"
    return [*rows, ("spare nodes", f"{faults.spares}", short)]


def _tiers(plan: FleetPlan) -> Rows:
    rows: Rows = []
    for tier in plan.faults.tiers:
        every = "each step" if tier.name == "replicas" else f"every {days(tier.interval_s)}"
        cost = f"needed every {days(tier.mtbf_s)}; a copy blocks {days(tier.blocked_s)}, is durable after {days(tier.durable_s)}"
        cost = f"needed every {days(tier.mtbf_s)}; costs nothing, as the copy exists already" if tier.name == "replicas" else cost
        rows.append((TIER_NAMES[tier.name], every, cost + (f"; {tier.limit}" if tier.limit else "")))
    return rows


def _run(plan: FleetPlan) -> Rows:
    bill = plan.bill
    return [
        ("time", f"{bill.days:,.1f} days", f"for {plan.asked.run_tokens / 1e12:g} T tokens at {plan.kept_tokens_per_s:,.0f} kept tokens/s"),
        ("cost", f"{bill.usd / 1e6:,.2f} M USD", f"at {plan.asked.usd_per_gpu_hour:g} USD a GPU-hour, spares included"),
        ("energy", f"{bill.mwh:,.0f} MWh", f"{bill.power_mw:,.1f} MW at data sheet power, PUE {plan.asked.pue:g}"),
        ("carbon", f"{bill.tons_co2:,.0f} t CO2", f"at {plan.asked.g_per_kwh:g} g/kWh"),
    ]


def sweep_row(point: Point) -> tuple[str, ...]:
    """One line of a sweep; dashes where there is no plan."""
    value = f"{point.value:,}" if isinstance(point.value, int) else f"{point.value:g}"
    plan = point.plan
    if plan is None:
        return (value, *["-"] * 9)
    mapping, bill = plan.step.mapping, plan.bill
    return (
        value, f"{mapping.tensor} x {mapping.pipeline} x {mapping.data}", f"{plan.step.mfu:.1%}", days(plan.faults.mtbf_s),
        f"{plan.faults.goodput:.2%}", f"{plan.faults.spares}", f"{plan.kept_tokens_per_s:,.0f}", f"{bill.days:,.1f}",
        f"{bill.usd / 1e6:,.2f} M", f"{bill.tons_co2:,.0f}",
    )  # fmt: skip

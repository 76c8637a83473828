"""The log and its figures, in tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleet.laws.law import HOUR_S
from fleet.planning.traces import dates
from fleet.planning.traces.fit import ComponentRate, Lives, TraceFit
from fleet.planning.traces.goodness import MOST_LIVES
from fleet.planning.traces.importing import LEFT_OUT, Log, LogFinding

MOST_NAMED = 3
"""So many lines of the same kind are on the screen; ``--json`` has all."""
LEAST_P = 0.05
WIDE = 1.5
"""From this dispersion on, a sentence warns that the intervals of rates are too narrow."""


def understanding(log: Log) -> list[tuple[str, str]]:
    """The meaning given to the columns."""
    found = log.mapping
    shown = {
        "start": found.start, "end": found.end, "duration": f"{found.duration} ({found.duration_unit})" if found.duration else "",
        "node": " / ".join(found.node), "cause": ", ".join(found.cause), "cluster": found.group, "nodes": found.nodes,
        "dates": found.dates, "zone": f"{found.zone}; times are shown in UTC" if found.zone else "", "not used": ", ".join(log.unused),
    }  # fmt: skip
    return [("mapping", found.name), *((name, text) for name, text in shown.items() if text)]


def summary(log: Log) -> str:
    """One sentence on the log as a whole."""
    left_out = sum(finding.what in LEFT_OUT for finding in log.findings)
    clusters = f" in {len(log.groups)} clusters" if len(log.groups) > 1 else ""
    return (
        f"{len(log.entries):,} faults of {log.nodes:,} nodes{clusters} in {log.rows:,} rows ({left_out:,} left out), "
        f"{dates.shown(log.began_s)} to {dates.shown(log.ended_s)}: {log.exposure_node_s / HOUR_S:,.0f} node-hours ({log.exposure_of})"
    )


def findings(log: Log) -> Iterator[tuple[str, str, str]]:
    """(kind of finding, its number, the first lines)."""
    of_kind: dict[str, list[LogFinding]] = {}
    for finding in log.findings:
        of_kind.setdefault(finding.what, []).append(finding)
    for what, found in of_kind.items():
        named = ", ".join(f"{each.line}" + (f" ({each.detail})" if each.detail else "") for each in found[:MOST_NAMED])
        yield what, f"{len(found):,}", f"line{'s' if len(found) > 1 else ''} {named}" + (", ..." if len(found) > MOST_NAMED else "")


def rates(fit: TraceFit) -> list[tuple[str, ...]]:
    """Rows of (component, faults, share, node-hours for each, interval, law of the times between them)."""
    return [_rate(rate, fit.between.get(rate.component)) for rate in (*fit.rates, fit.total)]


def _rate(rate: ComponentRate, lives: Lives | None) -> tuple[str, ...]:
    high = f"{rate.high_hours:,.0f}" if rate.high_hours < 1e15 else "?"
    return (
        rate.component, f"{rate.faults:,}", f"{rate.share:.1%}", f"{rate.mttf_hours:,.0f}", f"{rate.low_hours:,.0f} to {high}",
        law(lives) if lives else "",
    )  # fmt: skip


def law(lives: Lives) -> str:
    """The best law with its parameters, and whether the lives follow it."""
    best = lives.best
    if best is None:
        return f"too few ({lives.seen})"
    shown = ", ".join(f"{_plain(name)} {_value(name, value)} ({_value(name, low)} to {_value(name, high)})"
                      for name, (value, low, high) in best.parameters.items())  # fmt: skip
    fits = "" if best.p is None else f"; {'fits' if best.p >= LEAST_P else 'fits badly'}, p = {best.p:.2f}"
    return f"{best.law}: {shown}{fits}"


def _plain(name: str) -> str:
    return name.removesuffix("_s")


def _value(name: str, value: float) -> str:
    return f"{value / HOUR_S:,.4g} h" if name.endswith("_s") else f"{value:.3g}"


def sentences(fit: TraceFit) -> Iterator[str]:
    """Facts that are not in the tables."""
    whose = "a node" if fit.of_nodes else "the fleet (nodes are not named)"
    yield f"Laws are those of the times between faults of {whose}; their goodness of fit is tested on {MOST_LIVES} of them at most."
    if fit.repairs:
        yield f"Repair: mean {fit.repairs.mean_s / HOUR_S:,.2f} h, median {fit.repairs.median_s / HOUR_S:,.2f} h; {law(fit.repairs)}."
    if fit.dispersion > WIDE:
        yield (f"Faults come in heaps: counts vary {fit.dispersion:.1f} times as much as those of independent ones, so that the intervals "
               f"of rates are about {fit.dispersion**0.5:.1f} times too narrow.")  # fmt: skip
    yield from _bursts(fit)
    yield from _offenders(fit)
    if fit.trend:
        found = fit.trend
        yield f"Trend: {found.verdict} (Lewis and Robinson {found.lewis_robinson:+.1f}, p = {found.p:.2g})."
        if found.verdict != "steady":
            yield "The rate is not constant: fit only the last part with --since."


def _bursts(fit: TraceFit) -> Iterator[str]:
    found = fit.bursts
    if found is None:
        yield "Bursts: not looked for, as nodes are not named, or faults are too few."
    elif found.found:
        yield (f"Bursts: {found.followed} faults came within {found.within_s:,.0f} s of one of another node, and {found.expected:,.0f} "
               f"would by chance; {found.share:.1%} of faults are followed by others, the largest burst took {found.largest} nodes "
               f"(line {found.largest_line}).")  # fmt: skip
    else:
        yield f"Bursts: none beyond chance ({found.followed} faults soon after another, {found.expected:,.0f} expected)."


def _offenders(fit: TraceFit) -> Iterator[str]:
    found = fit.offenders
    if not found.nodes:
        yield "Repeat offenders: none beyond chance."
        return
    first = ", ".join(f"{each.node} ({each.faults} faults, {each.expected:.1f} expected)" for each in found.nodes[:MOST_NAMED])
    yield (f"Repeat offenders: {len(found.nodes)} nodes, {found.share:.2%} of all, have {found.faults:.1%} of the faults, "
           f"{found.factor:.1f} times as many as others: {first}{', ...' if len(found.nodes) > MOST_NAMED else ''}.")  # fmt: skip


def lines_of(found: Sequence[LogFinding]) -> list[dict[str, object]]:
    """All findings as plain data."""
    return [{"what": each.what.value, "line": each.line, "detail": each.detail} for each in found]

"""The output of ``fleet experiment scale`` in lines. Each line comes from the file's contents, so that a file can be printed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleet.ledger.step_terms import MEANINGS
from fleet.planning.scale import groups

Answer = Mapping[str, Any]
BUSY = 2.0
"""A host with more running or waiting threads than this for each core has other work on it."""


def took(seconds: float) -> str:
    """Three figures: two worlds often differ by less than a millisecond."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def visit_line(visit: Answer) -> str:
    """One visit."""
    whole_s, parts = sum(visit["terms"].values()), groups(visit["terms"])
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items())
    return f"world {visit['world']}: a step took {took(whole_s)} over {visit['steps']} steps ({shares}); {visit['run']}"


def prediction_line(said: Answer) -> str:
    """The prediction for the held-out world before it is trained with."""
    step, fitted = said["step_s"], ", ".join(map(str, said["law"]["worlds"]))
    return f"world {said['world']}, not measured yet: {_interval(step)} a step, predicted from {fitted} ({said['law']['confidence']:.0%})"


def measured_line(world: int, measured: Answer) -> str:
    """The measured step, beside its prediction."""
    verdict = "inside" if measured["inside"] else "outside"
    return f"world {world}, measured: {took(measured['step_s'])} a step, {verdict} ({measured['off']:+.1%} of the prediction)"


def law_lines(law: Answer) -> Iterator[str]:
    """The coefficients, dearest first."""
    yield f"the law, from {', '.join(map(str, law['worlds']))} ranks ({law['confidence']:.0%} intervals):"
    for name, value in sorted(law["coefficients_s"].items(), key=lambda item: -item[1]["value"]):
        yield f"  {name:<17} {_interval(value):<34} {COEFFICIENTS[name]}"


COEFFICIENTS: Mapping[str, str] = {
    "compute": f"{MEANINGS['compute']}, of all ranks together; 1/N of it each",
    "update": MEANINGS["update"],
    "data": f"{MEANINGS['data']}, of all ranks together; 1/N of it each",
    "exchange_alone": "adding up and bookkeeping of the exchange, at any world",
    "exchange_volume": "exchange of the gradients once there and back, x 2 (N-1)/N",
    "exchange_peers": "exchange with one peer more, x (N-1)",
    "wait": "deviation of a rank's step; ranks wait for x the largest of N such deviations",
    "verify": MEANINGS["verify"],
}
"""Name of a coefficient -> its meaning."""


def larger_table(larger: Answer) -> tuple[list[str], list[list[str]]]:
    """(heads, rows): the measured worlds and larger ones."""
    goods, money = larger["price"]["goods"], larger["price"]["money"]
    heads = ["world", "step", "90% interval", "efficiency", "kept", f"kept {goods}/s", f"{money} per M", f"a further M {goods}", "pays"]
    return heads, [_row(row) for row in larger["rows"]]


def _row(row: Answer) -> list[str]:
    step, further = row["step"], row["further_cost"]
    return [
        str(row["world"]), took(step["value"]), f"{took(step['low'])} .. {took(step['high'])}", f"{row['efficiency']:.0%}",
        f"{row['kept_share']:.2%}", f"{row['kept_per_s']:,.0f}", f"{row['cost']:,.3g}",
        f"{further:,.3g}" if further is not None else "-" if row["pays"] else "no gain",
        "yes" if row["pays"] else "no",
    ]  # fmt: skip


def larger_lines(larger: Answer) -> Iterator[str]:
    """The world from which more ranks do not pay, and the assumptions of that."""
    goods, failures = larger["price"]["goods"], larger["failures"]
    largest = larger["rows"][-1]["world"]
    if larger["pays_up_to"] < largest:
        dear = f"a further million {goods} costs more than {larger['pays']:g} times the cheapest"
        yield f"Adding ranks pays up to {larger['pays_up_to']}: beyond, {dear}."
    else:
        yield f"Adding ranks pays up to {largest}, the largest world of the table."
    if larger["fastest"] < largest:
        yield f"More than {larger['fastest']} ranks are slower than {larger['fastest']}."
    lost = f"a rank is lost every {failures['rank_mtbf_hours']:,.0f} h, and all stand still for {failures['recover_s']:g} s then"
    yield f"Assumed: {lost} (--mtbf-hours, --recover); recovery {failures['policy']}."
    if larger["price"]["money"] != "USD":
        yield "In rank-seconds, as no setting gives the cost of one: --config cost.usd_per_rank_hour=USD."


def limits(answer: Answer) -> Iterator[str]:
    """Limits of the figures, for the reader."""
    shards = answer["shards"]
    if answer["cpu_quota"] is not None:
        yield (
            f"Each rank had {answer['cpu_quota']:g} cores of one host, both for computing and for exchanging: the law has the shape of "
            "such ranks. A fleet has its own network, memory and caches, which ranks shared here."
        )
    if any(row["world"] > shards for row in answer["larger"]["rows"]):
        yield f"A step has {shards} shards: worlds beyond need more (shards=N), and the law lets them share the same batch."
    busiest = max(answer["visits"], key=lambda visit: float(visit["load"]))
    if busiest["load"] > BUSY * answer["cores"]:
        host = f"The host had a load of {busiest['load']:.0f} at world {busiest['world']}, on {answer['cores']:g} cores"
        yield f"{host}: other work ran beside the ranks, and its time is in these figures."
    yield "Intervals cover the difference between visits. They do not cover another shape of the law at worlds without a visit."


def _interval(said: Answer) -> str:
    return f"{took(said['value'])} ({took(said['low'])} .. {took(said['high'])})"

"""The check between nodes before a run: a node that is slow to all others, or reaches none, stays out of every view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from actors.link_survey import LinkSurvey
from fleet.ledger.health import Link
from fleet.protocol.decisions import Decision
from fleet.protocol.domains import Place as Domain
from fleet.protocol.provider import NodePlace
from policies import links

AT_ONCE = 4
"""Number of links that are measured at a time. Each measurement needs the wires of two nodes for itself."""


def measured(survey: LinkSurvey, nodes: Sequence[str], domains: Mapping[str, Domain], say: Callable[[str], None]) -> list[Link]:
    """Links between ``nodes``, or some of each node's where there are many. A link that looks slow is measured once more."""
    chosen = links.pairs(list(nodes))
    if not chosen:
        return []
    say(f"measuring {len(chosen)} links between {len(nodes)} nodes")
    found = survey.measure(links.rounds(chosen, AT_ONCE))
    doubtful = links.again(links.judge(found, domains), found)
    if not doubtful:
        return found
    say(f"measuring {len(doubtful)} of them once more")
    return links.best([*found, *survey.measure(links.rounds(doubtful, AT_ONCE))])


def kept_out(places: Mapping[int, NodePlace], say: Callable[[str], None]) -> dict[int, Decision]:
    """Index of each node that is not fit -> the decision with the reason. This process is connected to their cluster."""
    with LinkSurvey({place.host: (place.id, place.host) for place in places.values()}) as survey:
        found = measured(survey, [place.host for place in places.values()], {}, say)
    judged = {index: links.admit(place.host, found) for index, place in places.items()}
    return {index: decision for index, decision in judged.items() if decision.action == "keep_out"}

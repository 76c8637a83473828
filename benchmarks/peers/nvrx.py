"""NVIDIA's resiliency extension as a peer of ``benchmarks.detect``: its own scoring and its own report, on the same times.

``nvidia_resiliency_ext.straggler.Detector`` needs CUDA to start (CUPTI), its ``ReportGenerator`` does not. Only the transport of a report
is ours: this process finds the smallest median of all ranks, for which the extension would use an all-reduce.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

import numpy as np
from nvidia_resiliency_ext.straggler.reporting import Report, ReportGenerator
from nvidia_resiliency_ext.straggler.statistics import Statistic

from fleet.protocol.types import Member
from policies.straggler.detectors import KINDS, StepTimes

Summaries = dict[str, dict[Statistic, float]]
Accusation = tuple[Member, str, int]
Made = tuple[tuple[Member, ...], int, Report]

THRESHOLD = 0.75
"""The extension's default for all scores."""


def summaries(window: list[StepTimes], rank: int) -> Summaries:
    """The statistics that its detector computes from a section's times in one report interval."""
    found = {}
    for kind in KINDS:
        times = np.concatenate([portion.seconds(kind)[rank] for portion in window])
        found[kind] = {
            Statistic.MIN: float(times.min()), Statistic.MAX: float(times.max()), Statistic.MED: statistics.median_low(times.tolist()),
            Statistic.AVG: float(times.mean()), Statistic.STD: float(times.std(ddof=1)), Statistic.NUM: float(len(times)),
        }  # fmt: skip
    return found


def report(generators: list[ReportGenerator], ranks: list[Summaries]) -> Report:
    """One report for all ranks, with relative and individual scores of each section."""
    least = {kind: min(rank[kind][Statistic.MED] for rank in ranks) for kind in KINDS}
    relative: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    individual: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for rank, (generator, mine) in enumerate(zip(generators, ranks, strict=True)):
        generator._update_local_min_times({}, mine)
        for scores, reference in ((relative, least), (individual, generator.min_local_section_times)):
            for kind, score in generator._compute_sections_perf_scores(mine, reference).items():
                scores[kind][rank] = score
    nodes = {rank: f"node{rank}" for rank in range(len(ranks))}
    return Report({}, relative, {}, individual, nodes, {}, {}, 0.0, True, 0)


def reports(portions: tuple[StepTimes, ...], each: int) -> list[Made]:
    """A report for every ``each`` portions, from their times only, as the detector empties its sections after a report. The first window is
    warm-up and is left out."""
    generators = [ReportGenerator(["relative_perf_scores", "individual_perf_scores"], gather_on_rank0=False) for _ in portions[0].members]
    found: list[Made] = []
    for begin in range(each, len(portions) - each + 1, each):
        window = list(portions[begin : begin + each])
        made = report(generators, [summaries(window, rank) for rank in range(len(generators))])
        found.append((window[-1].members, window[-1].first_step + window[-1].network_s.shape[1] - 1, made))
    return found


def accusations(made: list[Made], thresholds: Mapping[str, float], individual: bool = False) -> Iterator[Accusation]:
    """(member, section, last step) when a report names a rank that the last report did not name, in sections with a threshold."""
    before: set[tuple[Member, str]] = set()
    for members, last, report_ in made:
        now = set()
        for kind, threshold in thresholds.items():
            named = report_.identify_stragglers(section_rel_threshold=threshold, section_indiv_threshold=threshold)
            sections = named[f"straggler_sections_{'individual' if individual else 'relative'}"]
            now |= {(members[rank.rank], kind) for rank in sections.get(kind, ())}
        yield from ((member, kind, last) for member, kind in sorted(now - before))
        before = now

"""Laws beside mlsysim 0.3.0 on the same inputs: ``python -m benchmarks.mlsysim`` prints the table of ``docs/laws.md``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fleet.laws import checkpointing, collectives, parallelism, reliability
from fleet.laws.law import HOUR_S


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity from both, with the reason where they differ."""

    name: str
    unit: str
    ours: float
    theirs: float
    why: str = ""


def rows() -> Iterator[Row]:
    """Every quantity that both have. Raises ImportError without mlsysim."""
    import mlsysim as m
    from mlsysim.core.units import Q_

    node_s = reliability.series_mttf_s(((50_000 * HOUR_S, 8), (150_000 * HOUR_S, 8), (100_000 * HOUR_S, 2)))
    node = m.calc_mtbf_node(Q_(50_000, "hour"), 8, Q_(150_000, "hour"), 8, Q_(100_000, "hour"), 2)
    yield Row("MTTF of a node, 8 GPUs, 8 NICs, 2 PSUs in series", "h", node_s / HOUR_S, node.m_as("hour"))
    fleet = m.calc_mtbf_cluster(node, 2048)
    fleet_s = reliability.mtbf_s(node_s, 2048)
    yield Row("MTBF of 2,048 such nodes", "h", fleet_s / HOUR_S, fleet.m_as("hour"))
    yield Row(
        "P(failure in 1 h) of them",
        "1",
        reliability.failure_probability(HOUR_S, fleet_s),
        _plain(m.calc_failure_probability(fleet, Q_(1, "hour"))),
    )
    young = m.calc_young_daly_interval(Q_(60, "second"), fleet.to("second")).m_as("second")
    yield Row("interval for a write of 60 s, Young", "s", checkpointing.young_work_s(60.0, fleet_s), young)
    exact = checkpointing.exact_work_s(60.0, fleet_s)
    yield Row("the same, exact", "s", exact, young, "theirs is Young's first order; the exact optimum solves w = M (1 + W(-exp(-C/M - 1)))")
    yield from _model(fleet_s, young)
    yield Row("ring all-reduce, 14 GB, 256 ranks, 50 GB/s, 5 us", "s", collectives.ring_all_reduce_s(14e9, 256, 50e9, 5e-6),
              m.calc_ring_allreduce_time(Q_(14e9, "byte"), 256, Q_(50e9, "byte/second"), Q_(5e-6, "second")).m_as("second"))  # fmt: skip
    yield Row("tree all-reduce, 1 MB, 256 ranks", "s", collectives.tree_all_reduce_s(1e6, 256, 50e9, 5e-6),
              m.calc_tree_allreduce_time(Q_(1e6, "byte"), 256, Q_(50e9, "byte/second"), Q_(5e-6, "second")).m_as("second"))  # fmt: skip
    yield Row("pipeline bubble, 8 stages, 32 micro-batches", "1", parallelism.pipeline_bubble(8, 32), _plain(m.calc_pipeline_bubble(8, 32)))
    yield Row(
        "checkpoint of 70.6 B parameters", "GB", checkpointing.state_bytes(70.6e9) / 1e9, m.calc_checkpoint_size(70.6e9).m_as("gigabyte")
    )


def _model(mtbf_s: float, interval_s: float) -> Iterator[Row]:
    """Its ReliabilityModel on the same fleet for a day, checkpoints of 60 s and recoveries of 300 s."""
    from mlsysim.engine.solvers.reliability import ReliabilityModel

    found = ReliabilityModel().solve(_fleet(), job_duration_hours=24.0, checkpoint_time_s=60.0, avg_recovery_time_s=300.0)
    yield Row("its ReliabilityModel: MTBF of that fleet", "h", mtbf_s / HOUR_S, found.fleet_mtbf.m_as("hour"))
    yield Row("its failures in a day", "1", reliability.expected_failures(24 * HOUR_S, mtbf_s), _plain(found.expected_failures))
    yield Row("its interval", "s", interval_s, found.optimal_checkpoint_interval.m_as("second"))
    ours = checkpointing.goodput(interval_s, 60.0, mtbf_s, 300.0, 0.0)
    yield Row("its goodput at that interval", "1", ours, _plain(found.goodput_ratio),
              "theirs is 1 - C/tau - R/M: the work since the last checkpoint is not lost in it")  # fmt: skip


def _fleet() -> Any:
    """2,048 nodes of mlsysim's registry with our parts: power supplies are not redundant, so the loss of either stops the node."""
    import mlsysim as m
    from mlsysim.systems.types import Fleet

    parts = {"nics_per_node": 8, "psus_per_node": 2, "psu_redundancy": 0}
    node = m.Systems.Nodes.DGX_H100.model_copy(update=parts)
    return Fleet(name="beside", node=node, count=2048, fabric=m.Systems.Fabrics.InfiniBand_NDR)


def _plain(value: Any) -> float:
    return float(getattr(value, "magnitude", value))


def table() -> str:
    """The table, in Markdown."""
    lines = ["| quantity | unit | Fleet | mlsysim 0.3.0 | difference |", "|---|---|---:|---:|---|"]
    for row in rows():
        same = abs(row.ours - row.theirs) <= 1e-6 * abs(row.ours)
        lines.append(f"| {row.name} | {row.unit} | {row.ours:.4g} | {row.theirs:.4g} | {'none' if same else row.why or 'unexplained'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")

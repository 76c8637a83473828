"""Published tables of large fleets, computed anew. Each value stands beside the printed one, with a note where the publication contradicts
itself. ``fleet laws`` prints them.

The module copies only the published values themselves. All else comes from the laws of this package and the inputs named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log10

from fleet.laws import checkpointing, collectives, energy, fleet_law, reliability, roofline, scaling
from fleet.laws.hardware import ACCELERATORS, FABRICS
from fleet.laws.law import DAY_S, HOUR_S

BOOK = "Machine Learning Systems (textbook), vol. 2, appendix Fleet"
TUTORIAL = "mlsysim tutorial, Scaling to 1000 GPUs"
SWEEP = (8, 32, 64, 128, 256, 512, 1024)
PER_NODE = 8
H100, NDR = ACCELERATORS["h100"], FABRICS["ib-ndr"]
PARAMETERS = 70.6e9
"""Parameters of Llama 3 70B, from the tutorial."""
NVLINK_BYTES_PER_S, NVLINK_LATENCY_S = 2.0 * H100.link_bytes_per_s, 0.5e-6
"""The tutorial counts both directions of NVLink."""
COMPUTE_S = 6.68
"""Compute of a step. The tutorial does not print it: its 89.9% at 1,024 GPUs and 750.3 ms of communication imply it; that of 8 agrees."""
MONTH_S = 30.0 * DAY_S
WRITE_S = 60.0
STORE_BYTES_PER_S = 7e9
NODE_MTTF_S = reliability.series_mttf_s(reliability.NODE_PARTS)


@dataclass(frozen=True, slots=True)
class PublishedValue:
    """One value.

    Attributes:
        value: computed here, in ``unit``.
        published: the printed value; None where none was printed.
        within: half of the last printed digit.
        source: the publication of the value, or of its method.
        note: the fault of the value, or of the value that it is compared with.
    """

    name: str
    value: float
    unit: str
    published: float | None = None
    within: float = 0.0
    source: str = BOOK
    note: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether both values are the same to the printed digits; None without a printed value."""
        return None if self.published is None else abs(self.value - self.published) <= self.within * (1.0 + 1e-9)


def tables() -> dict[str, list[PublishedValue]]:
    """Name of a table -> its rows."""
    return {
        "scale": [*scale()],
        "reliability": [*mtbf()],
        "checkpoint loss": [*checkpoint_loss()],
        "rack and power": [*power()],
        "energy productivity": [*productivity()],
        "reliability gap": [*gap()],
        "coordination tax": [*tax()],
    }


# ---- 8 to 1,024 GPUs ---------------------------------------------------------------------------------------------------------------------


def tutorial_comm_s(gpus: int) -> float:
    """Communication of a step by the tutorial's count: 8 tensor-parallel ranks in a node, and the rest data-parallel.

    Weights of a rank go once over NVLink. Gradients go round a ring in the node. With more than 8 replicas they take two such rings and a
    ring between nodes.
    """
    size, replicas = shard_bytes(), gpus // PER_NODE
    weights_s = collectives.message_s(size, NVLINK_BYTES_PER_S)
    if replicas <= PER_NODE:
        return weights_s + collectives.ring_all_reduce_s(size, replicas, NVLINK_BYTES_PER_S, NVLINK_LATENCY_S)
    inner_s = collectives.ring_all_reduce_s(size, PER_NODE, NVLINK_BYTES_PER_S, NVLINK_LATENCY_S)
    return weights_s + 2.0 * inner_s + collectives.ring_all_reduce_s(size, replicas // PER_NODE, NDR.bytes_per_s, NDR.latency_s)


def placed_comm_s(gpus: int) -> float:
    """The same with the replicas in their places: 8 tensor-parallel ranks fill a node, so all rings of replicas cross the network."""
    ring_s = collectives.ring_all_reduce_s(shard_bytes(), gpus // PER_NODE, NDR.bytes_per_s, NDR.latency_s)
    return collectives.message_s(shard_bytes(), NVLINK_BYTES_PER_S) + ring_s


def shard_bytes() -> float:
    """BF16 weights, and gradients, of one tensor-parallel rank."""
    return checkpointing.state_bytes(PARAMETERS, bytes_per_parameter=2) / PER_NODE


def scale() -> Iterator[PublishedValue]:
    """Communication and efficiency of a step of Llama 3 70B, 8 GPUs a node."""
    ms: Mapping[int, float] = {8: 19.6, 1024: 750.3}
    percent: Mapping[int, float] = {8: 99.7, 1024: 89.9}
    for gpus in SWEEP:
        note = "replicas are counted as if 8 shared a node, which tensor parallelism fills" if gpus > PER_NODE else ""
        yield PublishedValue(f"communication, {gpus} GPUs", 1e3 * tutorial_comm_s(gpus), "ms", ms.get(gpus), 0.05, TUTORIAL, note)
        yield PublishedValue(
            f"communication, {gpus} GPUs, each replica on a node of its own", 1e3 * placed_comm_s(gpus), "ms", source=TUTORIAL
        )
        share = 100.0 * collectives.serial_efficiency(COMPUTE_S, tutorial_comm_s(gpus))
        note = f"compute of {COMPUTE_S} s is not printed: it follows from the 89.9%" if gpus == SWEEP[-1] else ""
        yield PublishedValue(f"efficiency, {gpus} GPUs", share, "%", percent.get(gpus), 0.05, TUTORIAL, note)


def mtbf_of(gpus: int) -> float:
    """MTBF in seconds of so many GPUs in nodes of 8, with their NICs and power supplies in series."""
    return reliability.mtbf_s(NODE_MTTF_S, gpus / PER_NODE)


def mtbf() -> Iterator[PublishedValue]:
    """MTBF, failures of 30 days, and Young's interval for a write of 60 s."""
    printed = {
        8: (4285.7, 0.2, 12.0), 32: (1071.4, 0.7, 6.0), 64: (535.7, 1.3, 4.2), 128: (267.9, 2.7, 3.0), 256: (133.9, 5.4, 2.1),
        512: (67.0, 10.8, 1.5), 1024: (33.5, 21.5, 1.1),
    }  # fmt: skip
    for gpus in SWEEP:
        hours, failures, young = printed[gpus]
        note = "mlsysim 0.3.0 prints 36.6 h: there a node's power supplies are redundant" if gpus == SWEEP[-1] else ""
        yield PublishedValue(f"MTBF, {gpus} GPUs", mtbf_of(gpus) / HOUR_S, "h", hours, 0.05, TUTORIAL, note)
        yield PublishedValue(
            f"failures in 30 days, {gpus} GPUs", reliability.expected_failures(MONTH_S, mtbf_of(gpus)), "", failures, 0.05, TUTORIAL
        )
        yield PublishedValue(f"checkpoint interval, {gpus} GPUs", young_s(gpus, WRITE_S) / HOUR_S, "h", young, 0.05, TUTORIAL)


def young_s(gpus: int, write_s: float) -> float:
    """Young's interval in seconds."""
    return checkpointing.young_work_s(write_s, mtbf_of(gpus))


def checkpoint_loss() -> Iterator[PublishedValue]:
    """Hours of 30 days that checkpoints and rework take, and communication."""
    write_s = checkpointing.write_s(checkpointing.state_bytes(PARAMETERS), STORE_BYTES_PER_S)
    yield PublishedValue("checkpoint of 70.6 B parameters", checkpointing.state_bytes(PARAMETERS) / 1e9, "GB", 988.4, 0.05, TUTORIAL)
    yield PublishedValue("its write at 7 GB/s", write_s, "s", 141.2, 0.05, TUTORIAL)
    for gpus, printed in ((64, 9.5), (256, 19.0), (512, 26.9), (1024, 38.1)):
        lost_h = checkpointing.lost_s(MONTH_S, young_s(gpus, WRITE_S), write_s, mtbf_of(gpus)) / HOUR_S
        note = "the interval is that of a write of 60 s, and each write is paid with 141.2 s"
        yield PublishedValue(f"lost to checkpoints, {gpus} GPUs", lost_h, "h", printed, 0.05, TUTORIAL, note)
        consistent_h = checkpointing.lost_s(MONTH_S, young_s(gpus, write_s), write_s, mtbf_of(gpus)) / HOUR_S
        yield PublishedValue(f"the same, interval of the write that is paid, {gpus} GPUs", consistent_h, "h", source=TUTORIAL)
        comm_h = (1.0 - collectives.serial_efficiency(COMPUTE_S, tutorial_comm_s(gpus))) * MONTH_S / HOUR_S
        yield PublishedValue(f"lost to communication, {gpus} GPUs", comm_h, "h", source=TUTORIAL)
        ratio, note = {512: (0.4, "the text beside it says that checkpoints cost more than communication")}.get(gpus, (None, ""))
        yield PublishedValue(f"checkpoints over communication, {gpus} GPUs", lost_h / comm_h, "x", ratio, 0.05, TUTORIAL, note)


# ---- the fleet's foundations -------------------------------------------------------------------------------------------------------------


def power() -> Iterator[PublishedValue]:
    """Watts of racks, fleets and facilities."""
    assert H100.node_w is not None
    yield PublishedValue("rack of 4 DGX H100", energy.rack_w(4, H100.node_w) / 1e3, "kW", 40.8, 0.05, "DGX H100 data sheet")
    yield PublishedValue("nodes of a rack that air can cool", energy.air_cooled_nodes(H100.node_w), "", 2)
    yield PublishedValue("10,000 GPUs", energy.fleet_power_w(10_000, H100.power_w) / 1e6, "MW", 7.0, 0.05)
    yield PublishedValue("their facility, PUE 1.40", energy.fleet_power_w(10_000, H100.power_w, 1.4) / 1e6, "MW", 9.8, 0.05)
    for pue, kilowatt in ((1.06, 60), (1.12, 120), (1.40, 400), (1.58, 580)):
        yield PublishedValue(f"overhead of 1 MW, PUE {pue:.2f}", energy.overhead_w(1e6, pue) / 1e3, "kW", kilowatt, 0.5)
    for pue, megawatt in ((1.58, 15.8), (1.06, 10.6)):
        yield PublishedValue(f"facility of 10 MW, PUE {pue:.2f}", energy.facility_w(10e6, pue) / 1e6, "MW", megawatt, 0.05)
    yield PublishedValue("25,000 GPUs", energy.fleet_power_w(25_000, H100.power_w) / 1e6, "MW", 17.5, 0.05)


def productivity() -> Iterator[PublishedValue]:
    """Work for a joule."""
    peak = roofline.fleet_flop_per_s(25_000, H100.peak_flop_per_s)
    watts = energy.fleet_power_w(25_000, H100.power_w)
    yield PublishedValue("peak of 25,000 GPUs", peak / 1e19, "1e19 FLOP/s", 2.47, 0.005)
    yield PublishedValue("FLOP a joule, at the peak", energy.flop_per_j(peak, watts) / 1e12, "TFLOP/J")
    kept = scaling.effective_flop_per_s(1024, H100.peak_flop_per_s, mfu=0.5, scaling=0.5, goodput=0.77)
    yield PublishedValue("kept by 1,024 GPUs: MFU 0.5, scaling 0.5, goodput 0.77", kept / 1e12, "TFLOP/s", 194_951.7, 0.05)
    yield PublishedValue("FLOP a joule of them", energy.flop_per_j(kept, energy.fleet_power_w(1024, H100.power_w)) / 1e12, "TFLOP/J")
    yield PublishedValue(
        "the same in a facility, PUE 1.40", energy.flop_per_j(kept, energy.fleet_power_w(1024, H100.power_w, 1.4)) / 1e12, "TFLOP/J"
    )
    yield PublishedValue("energy of a 5 pJ/bit link, times less than of 10", energy.optics_ratio(10e-12, 5e-12), "x", 2, 0.5)
    yield PublishedValue("carbon of 800 g/kWh over 20", energy.carbon_ratio(800, 20), "x", 40, 0.5)


def gap() -> Iterator[PublishedValue]:
    """Reliable parts, and fleets of them that are not reliable."""
    for share, nodes, printed, within in ((0.999, 1_000, 36.8, 0.05), (0.999, 10_000, 0.0045, 5e-5), (0.9999, 10_000, 36.8, 0.05)):
        yield PublishedValue(
            f"no failure of {nodes:,} nodes, {share} each", 100.0 * reliability.all_survive(share, nodes), "%", printed, within
        )
    for gpus, hours, digits in ((256, 195.3, 0.05), (2048, 24.4, 0.05), (8192, 6.1, 0.05), (100_000, 0.50, 0.005)):
        yield PublishedValue(f"MTBF of {gpus:,} GPUs alone", reliability.mtbf_s(reliability.GPU_MTTF_S, gpus) / HOUR_S, "h", hours, digits)
    tail = 100.0 * reliability.any_slow(0.01, 100)
    yield PublishedValue("requests that meet a slow one of 100 servers, each slow 1% of the time", tail, "%", 63.4, 0.05)


def tax() -> Iterator[PublishedValue]:
    """The cost of working together."""
    gradients = checkpointing.state_bytes(175e9, bytes_per_parameter=4)
    yield PublishedValue("gradients of 175 B parameters", gradients / 1e9, "GB", 700, 0.5)
    for name, bits_per_s, printed in (("200 Gb/s", 200e9, 4.1), ("100 Gb/s", 100e9, 2.1)):
        share = 100.0 * collectives.serial_efficiency(1.2, collectives.message_s(gradients, bits_per_s / 8.0))
        note = "each byte is counted once: a ring moves about twice as many through each rank"
        yield PublishedValue(f"efficiency at {name}, 1.2 s of compute", share, "%", printed, 0.05, note=note)
    yield PublishedValue("their energy at 15 pJ/bit", energy.transfer_j(gradients, 15e-12), "J", 84, 0.5)
    yield PublishedValue("the same in 1e6 steps", energy.transfer_j(gradients * 1e6, 15e-12) / 1e6, "MJ", 84, 0.5)
    ring = 1e3 * collectives.ring_all_reduce_s(14e9, 256, NDR.bytes_per_s, NDR.latency_s)
    yield PublishedValue("ring all-reduce of 7 B parameters, 256 ranks", ring, "ms", 560.4, 0.05)
    small = "printed for 350 M parameters: 29.6 ms are those of 340 M"
    for millions, printed in ((350, 29.6), (340, 29.6)):
        ring = 1e3 * collectives.ring_all_reduce_s(millions * 2e6, 256, NDR.bytes_per_s, NDR.latency_s)
        yield PublishedValue(f"ring all-reduce of {millions} M parameters, 256 ranks", ring, "ms", printed, 0.05, note=small)
    for ranks, printed in ((32, 7.8), (256, 9.7), (1024, 9.9), (8192, 10.0)):
        speedup = scaling.amdahl_speedup(0.1, ranks)
        yield PublishedValue(f"speedup of {ranks:,} ranks, 10% serial", speedup, "x", printed, 0.05, "Amdahl 1967")
    yield PublishedValue("goodput: bubble 5, checkpoint 3, recovery 10, maintenance 5%", 100.0 * _overheads(), "%", 77, 0.5)
    yield PublishedValue("20 min of recovery, a failure every 2 h", 100.0 * reliability.recovery_share(1200, 7200), "%", 16.7, 0.05)
    yield PublishedValue("10x nominal, overhead 5% before and 40% after", scaling.effective_speedup(10, 0.05, 0.4), "x", 6.3, 0.05)
    yield PublishedValue("share that computes: 0.9, 0.8, 0.4 s", fleet_law.compute_share(0.9, 0.8, 0.4), "", 0.43, 0.005)
    yield PublishedValue(
        "stalls of 10 min, 100,000 GPUs, a failure every 18 min", 100.0 * reliability.effective_share(600, 1080), "%", 44, 0.5
    )
    note = "80% was printed: the wall-clock reading that gives 44% for 10 min gives 83.3% for 3 min"
    yield PublishedValue("stalls of 3 min", 100.0 * reliability.effective_share(180, 1080), "%", 80, 0.5, note=note)


def _overheads() -> float:
    return reliability.overhead_goodput((0.05, 0.03, 0.10, 0.05))


# ---- as text -----------------------------------------------------------------------------------------------------------------------------

SIGNS = {True: "same", False: "differs", None: ""}
HEADS = ("quantity", "unit", "here", "published", "", "note")


def cells(row: PublishedValue) -> tuple[str, ...]:
    """A row as text, in the order of ``HEADS``."""
    published = "" if row.published is None else _printed(row.published, row.within)
    return row.name, row.unit, shown(row.value), published, SIGNS[row.agrees], row.note


def _printed(value: float, within: float) -> str:
    """The value with the digits of the publication."""
    return f"{value:.{max(0, round(-log10(2.0 * within)))}f}" if within else shown(value)


def shown(value: float) -> str:
    """Six figures at most, and no exponent for numbers of a usual size."""
    return f"{value:.6g}" if 1e-4 <= abs(value) < 1e6 or not value else f"{value:.4g}"

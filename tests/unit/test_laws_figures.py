"""Published figures, one row each: law, inputs, expected value, half of the last digit that was published."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet.app.cli.main import app
from fleet.errors import ConfigError
from fleet.laws import checkpointing as ck
from fleet.laws import collectives as co
from fleet.laws import energy as en
from fleet.laws import exchange as ex
from fleet.laws import fleet_law as fl
from fleet.laws import memory, parallelism, published, spares, tiers
from fleet.laws import reliability as rel
from fleet.laws import roofline as ro
from fleet.laws import scaling as sc
from fleet.laws import training as tr
from fleet.laws.hardware import ACCELERATORS, FABRICS

MIN, HOUR, DAY, YEAR = 60.0, 3600.0, 86_400.0, 365 * 86_400.0
H100, NDR = ACCELERATORS["h100"], FABRICS["ib-ndr"]
GPU_S = 50_000 * HOUR
NODE_S = rel.series_mttf_s(rel.NODE_PARTS)
NODE_RATE = 3.8e-3 / DAY
META_RATE = 6.5e-3 / DAY

BOOK = "Machine Learning Systems (textbook), vol. 2"
LLAMA3 = "arXiv 2407.21783"
META = "arXiv 2410.21680"
DALY = "Daly 2006"


@dataclass(frozen=True)
class Row:
    """``law(**inputs) / unit`` is ``expected`` within ``within``."""

    id: str
    law: Callable[..., Any]
    expected: float
    within: float
    source: str
    unit: float
    inputs: dict[str, Any]

    def got(self) -> float:
        result = self.law(**self.inputs)
        return float(result) / self.unit


def row(id: str, law: Callable[..., Any], expected: float, within: float, source: str = BOOK, unit: float = 1.0, **inputs: Any) -> Row:
    return Row(id, law, expected, within, source, unit, inputs)


def _mtbf() -> Iterator[Row]:
    for gpus, hours, digits, percent, close in (
        (256, 195.3, 0.05, 11.6, 0.05), (2048, 24.4, 0.05, 62.6, 0.05), (8192, 6.1, 0.05, 98.04, 0.005),
        (100_000, 0.50, 0.005, 100, 0.005), (25_000, 2.0, 1e-9, 100, 0.005),
    ):  # fmt: skip
        yield row(f"mtbf-{gpus}", rel.mtbf_s, hours, digits, unit=HOUR, mttf_s=GPU_S, units=gpus)
        yield row(f"mtbf-{gpus}-p24h", rel.failure_probability, percent, close, unit=0.01, duration_s=DAY, mean_s=GPU_S / gpus)
    yield row("mtbf-8192-min", rel.mtbf_s, 366.2, 0.05, unit=MIN, mttf_s=GPU_S, units=8192)
    yield row("mtbf-25k-day", rel.expected_failures, 12, 1e-9, duration_s=DAY, mean_s=GPU_S / 25_000)
    yield row("mtbf-25k-year", rel.expected_failures, 4380, 1e-6, duration_s=YEAR, mean_s=GPU_S / 25_000)


def _node() -> Iterator[Row]:
    yield row("node-mttf", rel.series_mttf_s, 4285.7, 0.05, unit=HOUR, parts=rel.NODE_PARTS)
    yield row("psu-redundant", rel.series_mttf_s, 4687.5, 0.05, unit=HOUR, parts=rel.NODE_PARTS[:2])


RELIABILITY = (
    *_mtbf(),
    *_node(),
    row("llama3-mtbf", rel.unit_mttf_s, 3.1, 0.05, LLAMA3, HOUR, failures=419, units=1, duration_s=54 * DAY),
    row("llama3-node-days", rel.rate_per_unit_day, 3.79, 0.005, LLAMA3, 1e-3, failures=419, units=2048, duration_s=54 * DAY),
    row("llama3-gpu-hours", rel.unit_mttf_s, 50_677, 0.5, LLAMA3, HOUR, failures=419, units=16_384, duration_s=54 * DAY),
    row("llama3-interval", rel.poisson_halfwidth, 40, 0.5, LLAMA3, count=419),
    row(
        "llama3-effective",
        rel.effective_share,
        0.90,
        0.0005,
        f"{LLAMA3}: 466 interruptions in all",
        stall_s=16.7 * MIN,
        mean_s=54 * DAY / 466,
    ),
    row("meta-16k", rel.mtbf_s, 1.8, 0.05, META, HOUR, mttf_s=1 / META_RATE, units=16_384 / 8),
    row("meta-131k", rel.mtbf_s, 0.23, 0.005, META, HOUR, mttf_s=1 / META_RATE, units=131_072 / 8),
    row("recovery-tax", rel.recovery_share, 16.7, 0.05, unit=0.01, recovery_s=20 * MIN, mean_s=2 * HOUR),
    row("straggler", rel.straggler_loss, 20, 1e-9, unit=0.01, relative_speed=0.8),
    row("stall-10", rel.effective_share, 44, 0.5, "published claim, 100,000 GPUs", 0.01, stall_s=10 * MIN, mean_s=18 * MIN),
    row("stall-3", rel.effective_share, 83.3, 0.05, "wall-clock reading; 80% was published", 0.01, stall_s=3 * MIN, mean_s=18 * MIN),
    row("mean-down", rel.mean_down, 47.5, 1e-9, "Poisson", units=12_500, rate_per_s=NODE_RATE, repair_s=DAY),
    row("spares-24h", rel.poisson_quantile, 70, 0, "Poisson", mean=47.5, probability=0.999),
    row("spares-72h", rel.poisson_quantile, 181, 0, "Poisson", mean=142.5, probability=0.999),
    row("overheads", rel.overhead_goodput, 77, 1e-9, unit=0.01, overheads=(0.05, 0.03, 0.10, 0.05)),
)


def _checkpoints() -> Iterator[Row]:
    for name, parameters, gigabytes, seconds in (
        ("7b", 7e9, 98, 0.98),
        ("70b", 70e9, 980, 9.8),
        ("175b", 175e9, 2450, 24.5),
        ("1t", 1e12, 14e3, 140),
    ):
        yield row(f"ckpt-{name}-bytes", ck.state_bytes, gigabytes, 1e-6, unit=1e9, parameters=parameters)
        yield row(f"ckpt-{name}-write", ck.write_s, seconds, 1e-9, size_bytes=14 * parameters, bytes_per_s=100e9)
    for minutes, daly, exact, close in ((24 * 60, 116.7, 116.7, 0.05), (6 * 60, 56.7, 56.7, 0.05), (15, 9.14, 9.17, 0.005)):
        yield row(f"daly-{minutes}", ck.daly_work_s, daly, close, DALY, MIN, blocked_s=5 * MIN, mtbf_s=minutes * MIN)
        yield row(f"exact-{minutes}", ck.exact_work_s, exact, close, DALY, MIN, blocked_s=5 * MIN, mtbf_s=minutes * MIN)
    for name, nodes, blocked, work, ratio in (
        ("w60", 2000, 0, 60 * MIN, 0.684), ("w5", 2000, 0, 5 * MIN, 0.932), ("c10", 2048, 10, None, 0.901), ("c60", 2048, 60, None, 0.829),
    ):  # fmt: skip
        mtbf = 1 / (nodes * META_RATE)
        yield row(f"ettr-{name}", ck.ettr, ratio, 0.0005, META, work_s=work or ck.young_work_s(blocked, mtbf), blocked_s=blocked,
                  mtbf_s=mtbf, restart_s=5 * MIN)  # fmt: skip
    yield row("ettr-interval", ck.young_work_s, 360, 0.5, META, blocked_s=10, mtbf_s=1 / (2048 * META_RATE))


SEGMENT = {"work_s": 10.0, "blocked_s": 1.0, "mtbf_s": 18.0, "down_s": 5.0, "restart_s": 5.0}
CHECKPOINTS = (
    *_checkpoints(),
    row("train-state-1t", ck.state_bytes, 16, 1e-9, unit=1e12, parameters=1e12, bytes_per_parameter=16),
    row("train-state-gpus", ck.least_gpus, 200, 0, size_bytes=16e12, gpu_bytes=80e9),
    row("train-state-175b", ck.state_bytes, 2.8, 1e-9, unit=1e12, parameters=175e9, bytes_per_parameter=16),
    row("ckpt-llama70-hourly", rel.recovery_share, 3.92, 0.005, unit=0.01, recovery_s=988.4e9 / 7e9, mean_s=HOUR),
    row("exact-goodput", ck.goodput, 0.391, 0.0005, DALY, **SEGMENT),
    row("first-order-goodput", ck.goodput_first_order, 0.126, 0.0005, DALY, **SEGMENT),
    row("weibull-k1", tiers.weibull_goodput, ck.goodput(600, 60, 7200), 1e-9, "exponential", work_s=600, blocked_s=60,
        mtbf_s=7200, shape=1.0),
    row("multilevel", tiers.multilevel_overhead, (2e-4) ** 0.5 + (4e-4) ** 0.5, 1e-12, "Benoit et al. 2017", blocked_s=(1, 10),
        rates_per_s=(1e-4, 2e-5)),
)  # fmt: skip


def _f_compute(**inputs: float) -> float:
    assert fl.term_to_attack(**inputs) == "T_comm"
    return fl.compute_share(**inputs)


def _dp(**inputs: int) -> int:
    return parallelism.largest_mapping(**inputs).data


def _mapped(**inputs: int) -> int:
    return parallelism.largest_mapping(**inputs).gpus


def _tax(compute_s: float, size_bytes: float, bits_per_s: float) -> float:
    return co.serial_efficiency(compute_s, co.message_s(size_bytes, bits_per_s / 8))


COMMUNICATION = (
    row("ring-7b", co.ring_all_reduce_s, 560.4, 0.05, unit=1e-3, size_bytes=14e9, ranks=256, bytes_per_s=NDR.bytes_per_s, latency_s=5e-6),
    row("ring-7b-rho", co.communication_ratio, 0.112, 0.0005, communication_s=0.5604, compute_s=5.0),
    row("ring-340m", co.ring_all_reduce_s, 29.6, 0.05, unit=1e-3, size_bytes=680e6, ranks=256, bytes_per_s=50e9, latency_s=5e-6),
    row("ring-340m-rho", co.communication_ratio, 3, 0.05, communication_s=0.0296, compute_s=0.010),
    row("ring-175b", ck.state_bytes, 700, 1e-9, unit=1e9, parameters=175e9, bytes_per_parameter=4),
    row("ring-175b-endpoint", co.all_reduce_endpoint_bytes, 2 * 1023 / 1024, 1e-12, unit=700e9, size_bytes=700e9, ranks=1024),
    row("tax-ib", _tax, 4.1, 0.05, unit=0.01, compute_s=1.2, size_bytes=700e9, bits_per_s=200e9),
    row("tax-eth", _tax, 2.1, 0.05, unit=0.01, compute_s=1.2, size_bytes=700e9, bits_per_s=100e9),
    *(row(f"amdahl-10-{n}", sc.amdahl_speedup, x, 0.05, "Amdahl 1967", serial_share=0.1, ranks=n)
      for n, x in ((32, 7.8), (256, 9.7), (1024, 9.9), (8192, 10.0), (float("inf"), 10.0))),
    row("amdahl-20", sc.amdahl_speedup, 5, 1e-12, "Amdahl 1967", serial_share=0.2, ranks=float("inf")),
    *(row(f"published-{n}", sc.published_efficiency, x, 1e-9, unit=0.01, ranks=n)
      for n, x in ((32, 90), (256, 70), (1024, 50), (8192, 35))),
    row("scale-4096", sc.scaling_efficiency, 31.2, 0.051, unit=0.01, throughput_ratio=2.5, ranks_ratio=4, reference_efficiency=0.5),
    row("compound", sc.effective_flop_per_s, 194_951.7, 0.05, unit=1e12, gpus=1024, peak_flop_per_s=H100.peak_flop_per_s, mfu=0.5,
        scaling=0.5, goodput=0.77),
    row("compound-share", sc.compound_share, 19.2, 0.051, unit=0.01, shares=(0.5, 0.5, 0.77)),
    row("fleet-law", fl.overlap_s, 0.2, 1e-12, step_s=1.3, compute_s=1000, ranks=1000, comm_s=0.5, sync_s=0),
    row("fleet-law-step", fl.fleet_step_s, 1.3, 1e-12, compute_s=1000, ranks=1000, comm_s=0.5, sync_s=0, overlap_s=0.2),
    row("f-compute", _f_compute, 0.43, 0.005, compute_s=0.9, comm_s=0.8, sync_s=0.4),
    row("f-compute-halved", _f_compute, 0.27, 0.005, compute_s=0.45, comm_s=0.8, sync_s=0.4),
    row("intensity-low", sc.communication_intensity_bytes_per_flop, 1e-7, 1e-20, size_bytes=10e6, work_flop=1e14),
    row("intensity-high", sc.communication_intensity_bytes_per_flop, 1e-4, 1e-17, size_bytes=1e9, work_flop=1e13),
    row("effective", sc.effective_speedup, 6.3, 0.05, nominal=10, overhead_before=0.05, overhead_after=0.40),
    row("bubble", parallelism.pipeline_bubble, 15 / 47, 1e-12, "GPipe", stages=16, micro_batches=32),
    row("map-3d-dp", _dp, 781, 0, gpus=100_000, tensor=8, pipeline=16),
    row("map-3d-gpus", _mapped, 99_968, 0, gpus=100_000, tensor=8, pipeline=16),
    row("links", co.link_ratio, 9, 1e-12, fast_bytes_per_s=H100.link_bytes_per_s, slow_bytes_per_s=NDR.bytes_per_s),
    row("stack", sc.remaining_factor, 10, 1e-12, wanted=100, parts=(4, 2.5)),
)  # fmt: skip

TRILLION = {"gpus": 100_000, "peak_flop_per_s": 1e15, "mfu": 0.4, "parameters": 1e12}


def _tokens_a_day(**inputs: float) -> float:
    return tr.tokens_a_day(tr.training_tokens_per_s(**inputs))


def _days(tokens: float, **inputs: float) -> float:
    return tr.training_time_s(tokens, tr.training_tokens_per_s(**inputs)) / DAY


COMPUTE = (
    row("ridge", ro.ridge_flop_per_byte, 295.2, 0.05, "H100 data sheet", peak_flop_per_s=H100.peak_flop_per_s,
        bytes_per_s=H100.memory_bytes_per_s),
    row("decode-bytes", ck.state_bytes, 16.1, 0.05, LLAMA3, 1e9, parameters=8.03e9, bytes_per_parameter=2),
    row("decode-intensity", ro.decode_flop_per_byte, 1, 1e-12, batch=1),
    row("decode", ro.decode_tokens_per_s, 208.6, 0.05, parameters=8.03e9, bytes_per_s=3.35e12),
    row("tokens", tr.training_tokens_per_s, 6.7, 0.05, unit=1e6, **TRILLION),
    row("tokens-day", _tokens_a_day, 5.8, 0.05, unit=1e11, **TRILLION),
    row("tokens-15t", _days, 26, 0.5, tokens=15e12, **TRILLION),
    row("chinchilla-70b", tr.compute_optimal_tokens, 1.4, 1e-9, "arXiv 2203.15556", 1e12, parameters=70e9),
    row("chinchilla-budget", tr.compute_optimal_parameters, 70, 0.05, "arXiv 2203.15556", 1e9, work_flop=5.88e23),
)  # fmt: skip


def _zero(data: int, zero: int, parameters: float = 7.5e9) -> float:
    return memory.model_state(parameters, data=data, zero=zero).total_bytes


ZERO = "arXiv 1910.02054, figure 1"
MEMORY = tuple(
    row(f"zero-{stage}", _zero, gigabytes, 0.05, ZERO, 1e9, data=64, zero=stage) for stage, gigabytes in enumerate((120, 31.4, 16.6, 1.9))
)


def _repair(name: str, **inputs: float) -> float:
    return float(getattr(spares.machine_repair(**inputs), name))


def _exposed(**inputs: Any) -> float:
    moved = {"forward_bytes": 100e6, "backward_bytes": 100e6, "sum_bytes": 150e6, "last_bytes": 10e6}
    return ex.exposed_exchange(**moved, bytes_per_s=100e6, units=5, **inputs).total_s


HAND = "by hand, see above the row"
PAIR = {"units": 2, "spares": 1, "rate_per_s": 0.1, "repair_s": 1.0}
BY_HAND = (
    # 100 FLOP/B x 3.35 TB/s = 335 TFLOP/s, below the peak; 1,000 FLOP/B would be 3,350 TFLOP/s, so that the peak of 989 is all there is
    row("attainable-memory", ro.attainable_flop_per_s, 335, 1e-9, HAND, 1e12, intensity=100, peak_flop_per_s=989e12, bytes_per_s=3.35e12),
    row("attainable-peak", ro.attainable_flop_per_s, 989, 1e-9, HAND, 1e12, intensity=1000, peak_flop_per_s=989e12, bytes_per_s=3.35e12),
    # 2,967 TFLOP at 989 TFLOP/s take 3 s, and 6.7 TB at 3.35 TB/s 2 s: the arithmetic counts; with 989 TFLOP, 1 s, the bytes do
    row("kernel-arithmetic", ro.kernel_s, 3, 1e-12, HAND, work_flop=2967e12, moved_bytes=6.7e12, peak_flop_per_s=989e12,
        bytes_per_s=3.35e12),
    row("kernel-memory", ro.kernel_s, 2, 1e-12, HAND, work_flop=989e12, moved_bytes=6.7e12, peak_flop_per_s=989e12, bytes_per_s=3.35e12),
    # 6 x 500e9 = 3e12 FLOP a token; 250,000 tokens/s are 7.5e17 FLOP/s, of 6,000 x 250e12 = 1.5e18: a half
    row("mfu", ro.mfu, 0.5, 1e-12, HAND, tokens_per_s=250_000, flop_per_token=3e12, gpus=6000, peak_flop_per_s=250e12),
    # backward 2, forward 1, and all of the forward again: 4 passes where 3 count, 0.42 x 4/3 = 0.56; a half of it again: 0.42 x 3.5/3
    row("hfu-full", ro.hfu, 0.56, 1e-12, HAND, mfu=0.42, recompute_share=1.0),
    row("hfu-half", ro.hfu, 0.49, 1e-12, HAND, mfu=0.42, recompute_share=0.5),
    # 100 GPUs x 36 h x 2.50 USD; 1,250 kWh x 0.08 USD; 10 x 700 W for an hour are 7 kWh
    row("rental", en.rental_usd, 9000, 1e-9, HAND, gpus=100, duration_s=36 * HOUR, usd_per_gpu_hour=2.5),
    row("energy-price", en.energy_usd, 100, 1e-9, HAND, used_kwh=1250, usd_per_kwh=0.08),
    row("energy", en.energy_kwh, 7, 1e-12, HAND, power_w=7000, duration_s=HOUR),
    # 1 MB at 50 GB/s is 20 us, with the latency 25 us; 256 ranks are 8 levels up and 8 down, 5 ranks 3 and 3
    row("tree-256", co.tree_all_reduce_s, 400, 1e-9, HAND, 1e-6, size_bytes=1e6, ranks=256, bytes_per_s=50e9, latency_s=5e-6),
    row("tree-5", co.tree_all_reduce_s, 150, 1e-9, HAND, 1e-6, size_bytes=1e6, ranks=5, bytes_per_s=50e9, latency_s=5e-6),
    # 14 GB at 50 GB/s are 280 ms, there and back 560; 16 levels of 5 us are 0.08 ms
    row("double-tree", co.double_tree_all_reduce_s, 560.08, 1e-9, HAND, 1e-3, size_bytes=14e9, ranks=256, bytes_per_s=50e9, latency_s=5e-6),
    # of 28 GB on 8 ranks with a copy of each eighth a rank lacks 6/8, 21 GB, twice; it sends 7/8 and a mean of 1/8
    row("gathered", ex.gathered_bytes, 42, 1e-9, HAND, 1e9, parameter_bytes=28e9, ranks=8, copies=1, gathers=2),
    row("gathered-nothing", ex.gathered_bytes, 0, 1e-9, HAND, 1e9, parameter_bytes=28e9, ranks=2, copies=1, gathers=2),
    row("summed", ex.summed_bytes, 28, 1e-9, HAND, 1e9, gradient_bytes=28e9, ranks=8, copies=1),
    row("summed-whole", ex.summed_bytes, 49, 1e-9, HAND, 1e9, gradient_bytes=28e9, ranks=8, copies=7),
    # two shards, each to an owner and a guard: 4 x 7/8, and no mean
    row("summed-twice", ex.summed_bytes, 98, 1e-9, HAND, 1e9, gradient_bytes=28e9, ranks=8, copies=1, partials=2, adders=2),
    # 350 MB at 100 MB/s; 4 of 5 units are gathered while others compute, in 0.8 s forward and 0.8 s backward; in the rest of 4/5 of the
    # backward's time gradients travel, 1.4 s of them but for the last unit
    row("exposed-step", _exposed, 3.5, 1e-9, HAND),
    row("exposed-shard", _exposed, 2.7, 1e-9, HAND, backward_s=1.0, leave=True),
    row("exposed-long-backward", _exposed, 1.9, 1e-9, HAND, backward_s=2.0, leave=True),
    row("exposed-longer-backward", _exposed, 1.3, 1e-9, HAND, backward_s=3.0, leave=True),
    row("exposed-forward", _exposed, 3.1, 1e-9, HAND, forward_s=0.5),
    row("exposed-long-forward", _exposed, 2.7, 1e-9, HAND, forward_s=5.0),
    row("exposed-shards", _exposed, 2.9, 1e-9, HAND, forward_s=5.0, shards=2),
    # 10 gathers and a sum are 1 ms there and 1 back; if gradients leave, 5 of them and 5 means wait for an answer each
    row("exposed-asked", _exposed, 3.522, 1e-9, HAND, latency_s=1e-3),
    row("exposed-asked-more", _exposed, 3.53, 1e-9, HAND, latency_s=1e-3, leave=True),
    # in the node 2 x (7/8 x 8 GB / 400 GB/s + 7 us) = 35.014 ms; then a GB for each rank between the two nodes,
    # 2 x (1/2 x 1 GB / 50 GB/s + 5 us) = 20.01 ms
    row("hierarchical", co.hierarchical_all_reduce_s, 55.024, 1e-9, HAND, 1e-3, size_bytes=8e9, ranks=16, ranks_per_node=8,
        inner_bytes_per_s=400e9, outer_bytes_per_s=50e9, inner_latency_s=1e-6, outer_latency_s=5e-6),
    # 63/64 x 640 MB = 630 MB at 50 GB/s are 12.6 ms, and 63 messages of 5 us 0.315 ms
    row("all-to-all", co.all_to_all_s, 12.915, 1e-9, HAND, 1e-3, size_bytes=640e6, ranks=64, bytes_per_s=50e9, latency_s=5e-6),
    # 1,024 - 0.1 x 1,023
    row("gustafson", sc.gustafson_speedup, 921.7, 1e-9, "Gustafson 1988", serial_share=0.1, ranks=1024),
    # two units and a spare, each failing at 0.1 and repaired at 1. Units that run with 0, 1, 2 down: 2, 2, 1.
    # One crew: weights 1, 0.2, 0.2 x 0.2 = 0.04, 0.04 x 0.1 = 0.004, in all 1.244; down 0.292, short 0.044, missing 0.04 + 2 x 0.004
    row("repair-1-down", _repair, 0.292 / 1.244, 1e-12, HAND, name="mean_down", crews=1, **PAIR),
    row("repair-1-short", _repair, 0.044 / 1.244, 1e-12, HAND, name="short_probability", crews=1, **PAIR),
    row("repair-1-missing", _repair, 0.048 / 1.244, 1e-12, HAND, name="missing", crews=1, **PAIR),
    # two crews: weights 1, 0.2, 0.2 x 0.2/2 = 0.02, 0.02 x 0.1/2 = 0.001, in all 1.221
    row("repair-2-short", _repair, 0.021 / 1.221, 1e-12, HAND, name="short_probability", crews=2, **PAIR),
)  # fmt: skip

ROWS = (*RELIABILITY, *CHECKPOINTS, *COMMUNICATION, *COMPUTE, *MEMORY, *BY_HAND)


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_published_figure(row: Row) -> None:
    assert row.got() == pytest.approx(row.expected, rel=0, abs=row.within * (1 + 1e-9) + 1e-12), row.source


def test_rows_have_names_of_their_own() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)


def test_the_exact_number_of_spares_is_near_the_poisson_one() -> None:
    """A fleet that is short of nodes has fewer to fail, so that the exact answer is never above the Poisson one by more than rounding."""
    for repair_s, poisson in ((DAY, 70), (3 * DAY, 181)):
        assert spares.spares_for_risk(12_500, NODE_RATE, repair_s, 0.001) == pytest.approx(poisson, abs=1)


PUBLISHED = [(name, each) for name, rows in published.tables().items() for each in rows]
CONTRADICT = ["ring all-reduce of 350 M parameters, 256 ranks", "stalls of 3 min"]
"""What contradicts its own inputs, so that no law gives it."""


@pytest.mark.parametrize(("table", "each"), PUBLISHED, ids=[f"{name}: {each.name}" for name, each in PUBLISHED])
def test_a_published_table_is_computed_as_printed(table: str, each: published.PublishedValue) -> None:
    assert math.isfinite(each.value) and each.source
    assert each.agrees in ((None, True) if each.name not in CONTRADICT else (False,)), (each.value, each.published)
    assert each.agrees is not False or each.note


def test_the_sweep_goes_from_8_to_1024_gpus_as_published() -> None:
    found = {each.name: each for _, each in PUBLISHED}
    ends = [found[f"{what}, {gpus} GPUs"].published for what in ("communication", "efficiency") for gpus in (8, 1024)]
    assert ends == [19.6, 750.3, 99.7, 89.9]
    assert len({each.name for _, each in PUBLISHED}) == len(PUBLISHED)


def test_a_consistent_interval_loses_less_than_the_published_one() -> None:
    """The published loss takes its interval from a 60 s write and pays 141.2 s for each: a known contradiction."""
    found = {each.name: each.value for _, each in PUBLISHED}
    for gpus in (64, 256, 512, 1024):
        consistent = found[f"the same, interval of the write that is paid, {gpus} GPUs"]
        assert consistent < found[f"lost to checkpoints, {gpus} GPUs"]


def test_a_value_that_differs_is_said_to_differ() -> None:
    assert published.PublishedValue("x", 1.06, "", 1.0, 0.05).agrees is False
    assert published.cells(published.PublishedValue("x", 1.06, "h", 1.0, 0.05, note="why")) == ("x", "h", "1.06", "1.0", "differs", "why")
    assert published.cells(published.PublishedValue("x", 1.05, "h", 1.0, 0.05))[4] == "same"
    assert published.cells(published.PublishedValue("x", 1.05, "h"))[3:5] == ("", "")


def test_the_command_prints_a_table_and_all_as_json() -> None:
    reported = CliRunner().invoke(app, ["laws", "--table", "scale"], catch_exceptions=False).output
    assert re.search(r"communication, 1024 GPUs +ms +750\.289 +750\.3 +same", reported) and "reliability" not in reported
    found = json.loads(CliRunner().invoke(app, ["laws", "--json", "-"], catch_exceptions=False).output)
    assert [*found] == [*published.tables()] and found["scale"][0]["agrees"] is True
    done = CliRunner().invoke(app, ["laws", "--table", "scales"])
    assert isinstance(done.exception, ConfigError) and "checkpoint loss" in str(done.exception)


if __name__ == "__main__":
    for each in ROWS:
        print(f"{each.id:24} {each.got():14.6g}  published {each.expected:12.6g} ± {each.within:g}  {each.source}")

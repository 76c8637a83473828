"""Accelerators and fabrics, each with the source of its figures. Rates are dense (without sparsity), links are one direction."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.laws.registry import find

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator, and its node.

    Attributes:
        peak_flop_per_s: dense BF16 (FP16 where there is no BF16).
        memory_bytes, memory_bytes_per_s: high-bandwidth memory.
        link_bytes_per_s: to the other accelerators of its node, one direction, all links together.
        power_w: of the accelerator; ``node_w``: most power of a whole node, None where it is not published.
    """

    name: str
    peak_flop_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    power_w: float
    per_node: int
    node_w: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Fabric:
    """A network between nodes: one direction of the port of one accelerator, and the latency of one message."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str


_ACCELERATORS = (
    ("v100-32gb", 125, 32, 0.900, 150, 300, 8, 3500, "NVIDIA V100 data sheet (FP16); DGX-1V data sheet"),
    ("a100-40gb", 312, 40, 1.555, 300, 400, 8, 6500, "NVIDIA A100 data sheet; DGX A100 data sheet"),
    ("a100-80gb", 312, 80, 2.039, 300, 400, 8, 6500, "NVIDIA A100 data sheet; DGX A100 data sheet"),
    ("h100", 989, 80, 3.35, 450, 700, 8, 10_200, "NVIDIA H100 data sheet (SXM); DGX H100 data sheet"),
    ("h800", 989, 80, 3.35, 200, 700, 8, None, "DeepSeek-V3, arXiv 2412.19437 (NVLink); NVIDIA H100 data sheet for the rest"),
    ("h200", 989, 141, 4.80, 450, 700, 8, 10_200, "NVIDIA H200 data sheet (SXM); DGX H200 data sheet"),
    ("b200", 2250, 180, 8.00, 900, 1000, 8, 14_300, "NVIDIA DGX B200 data sheet"),
    ("gb200", 2500, 186, 8.00, 900, 1200, 72, 120_000, "NVIDIA GB200 NVL72 data sheet; a node is the NVLink domain of a rack"),
    ("l40s", 362, 48, 0.864, 32, 350, 8, None, "NVIDIA L40S data sheet (PCIe 4)"),
    ("mi300x", 1307.4, 192, 5.30, 448, 750, 8, None, "AMD Instinct MI300X data sheet"),
    ("mi325x", 1307.4, 256, 6.00, 448, 1000, 8, None, "AMD Instinct MI325X data sheet"),
    ("gaudi3", 1835, 128, 3.70, 525, 900, 8, None, "Intel Gaudi 3 white paper: 21 of 24 ports of 200 GbE within the node"),
    ("tpu-v4", 275, 34.36, 1.2288, 300, 192, 4, None, "Jouppi et al. 2023 (ISCA), arXiv 2304.01433: 32 GiB, 6 links of 50 GB/s"),
)  # fmt: skip
"""(name, TFLOP/s, GB, TB/s, GB/s of links, W, accelerators a node, W of the node, source)."""

ACCELERATORS = {
    name: Accelerator(name, peak * TERA, size * GIGA, rate * TERA, link * GIGA, watt, count, node, source)
    for name, peak, size, rate, link, watt, count, node, source in _ACCELERATORS
}

FABRICS = {
    fabric.name: fabric
    for fabric in (
        Fabric("ib-hdr", 25e9, 5e-6, "InfiniBand HDR: 200 Gb/s a port"),
        Fabric("ib-ndr", 50e9, 5e-6, "InfiniBand NDR: 400 Gb/s a port"),
        Fabric("ib-xdr", 100e9, 5e-6, "InfiniBand XDR: 800 Gb/s a port"),
        Fabric("roce-400", 50e9, 8e-6, "400 GbE RoCE: Gangidi et al. 2024 (SIGCOMM); latency assumed"),
        Fabric("eth-200", 25e9, 10e-6, "200 GbE; latency assumed"),
        Fabric("eth-100", 12.5e9, 10e-6, "100 GbE; latency assumed"),
    )
}


def accelerator(name: str) -> Accelerator:
    """The accelerator of this name. Raises ConfigError with the nearest name."""
    return find("hardware", name, ACCELERATORS)


def fabric(name: str) -> Fabric:
    """The fabric of this name. Raises ConfigError with the nearest name."""
    return find("fabric", name, FABRICS)

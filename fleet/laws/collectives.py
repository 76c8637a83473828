"""Collectives in the alpha-beta model: a message of S bytes takes alpha + S / beta, alpha = ``latency_s``, beta = ``bytes_per_s``.

``size_bytes`` is the whole buffer that every rank holds before an all-reduce; ``bytes_per_s`` is one direction of one rank's link.
"""

from __future__ import annotations

from fleet.laws.law import NonNegative, OneToInfinity, Positive, ceil, law, log2, where

THAKUR = "Thakur et al. 2005, IJHPCA 19(1)"
RING = f"Patarasuk & Yuan 2009, JPDC 69(2); {THAKUR}"
TREES = "Sanders et al. 2009, Parallel Computing 35(12); NCCL 2.4 double binary trees"
IB, ALPHA = 50e9, 5e-6


@law("Hockney 1994, Parallel Computing 20(3)", size_bytes=1e9, bytes_per_s=IB, latency_s=ALPHA)
def message_s(size_bytes: NonNegative, bytes_per_s: Positive, latency_s: NonNegative = 0.0) -> float:
    """One message: alpha + S / beta."""
    return latency_s + size_bytes / bytes_per_s


@law(RING, size_bytes=14e9, ranks=256, bytes_per_s=IB, latency_s=ALPHA)
def reduce_scatter_s(size_bytes: NonNegative, ranks: Positive, bytes_per_s: Positive, latency_s: NonNegative = 0.0) -> float:
    """Ring reduce-scatter: (N-1)/N S/beta + (N-1) alpha. An all-gather of S bytes in all takes the same."""
    return _ring(size_bytes, ranks, bytes_per_s, latency_s, 1.0)


@law(RING, size_bytes=14e9, ranks=256, bytes_per_s=IB, latency_s=ALPHA)
def ring_all_reduce_s(size_bytes: NonNegative, ranks: Positive, bytes_per_s: Positive, latency_s: NonNegative = 0.0) -> float:
    """Ring all-reduce: 2 (N-1)/N S/beta + 2 (N-1) alpha."""
    return _ring(size_bytes, ranks, bytes_per_s, latency_s, 2.0)


def _ring(size_bytes: float, ranks: float, bytes_per_s: float, latency_s: float, passes: float) -> float:
    others = where(ranks > 1.0, ranks - 1.0, 0.0)
    return passes * (others / ranks * size_bytes / bytes_per_s + others * latency_s)


@law(RING, size_bytes=700e9, ranks=1024)
def all_reduce_endpoint_bytes(size_bytes: NonNegative, ranks: Positive) -> float:
    """Bytes that one rank sends (and receives) in a bandwidth-optimal all-reduce: 2 (N-1)/N S."""
    return 2.0 * where(ranks > 1.0, ranks - 1.0, 0.0) / ranks * size_bytes


@law(f"{THAKUR}: binomial reduce, then broadcast", size_bytes=1e6, ranks=256, bytes_per_s=IB, latency_s=ALPHA)
def tree_all_reduce_s(size_bytes: NonNegative, ranks: Positive, bytes_per_s: Positive, latency_s: NonNegative = 0.0) -> float:
    """Binomial tree, not pipelined: 2 ceil(log2 N) (alpha + S/beta)."""
    return 2.0 * _levels(ranks) * (latency_s + size_bytes / bytes_per_s)


@law(TREES, size_bytes=14e9, ranks=256, bytes_per_s=IB, latency_s=ALPHA)
def double_tree_all_reduce_s(size_bytes: NonNegative, ranks: Positive, bytes_per_s: Positive, latency_s: NonNegative = 0.0) -> float:
    """Two pipelined binary trees, each with half of the buffer: 2 S/beta + 2 ceil(log2 N) alpha (the pipeline's fill is left out)."""
    return 2.0 * where(ranks > 1.0, 1.0, 0.0) * size_bytes / bytes_per_s + 2.0 * _levels(ranks) * latency_s


def _levels(ranks: float) -> float:
    return ceil(log2(where(ranks > 1.0, ranks, 1.0)))


@law(f"{RING}, within and between nodes", size_bytes=14e9, ranks=256, ranks_per_node=8, inner_bytes_per_s=450e9, outer_bytes_per_s=IB,
     inner_latency_s=1e-6, outer_latency_s=ALPHA)  # fmt: skip
def hierarchical_all_reduce_s(
    size_bytes: NonNegative,
    ranks: Positive,
    ranks_per_node: Positive,
    inner_bytes_per_s: Positive,
    outer_bytes_per_s: Positive,
    inner_latency_s: NonNegative = 0.0,
    outer_latency_s: NonNegative = 0.0,
) -> float:
    """Reduce-scatter in the node, all-reduce of S/n between nodes by each of n ranks, all-gather in the node; rings throughout."""
    inner = where(ranks < ranks_per_node, ranks, ranks_per_node)
    outer = _ring(size_bytes / inner, ranks / inner, outer_bytes_per_s, outer_latency_s, 2.0)
    return _ring(size_bytes, inner, inner_bytes_per_s, inner_latency_s, 2.0) + outer


@law(f"{THAKUR}: pairwise exchange", size_bytes=1e9, ranks=64, bytes_per_s=IB, latency_s=ALPHA)
def all_to_all_s(size_bytes: NonNegative, ranks: Positive, bytes_per_s: Positive, latency_s: NonNegative = 0.0) -> float:
    """Pairwise all-to-all of S bytes a rank: (N-1)/N S/beta + (N-1) alpha."""
    return _ring(size_bytes, ranks, bytes_per_s, latency_s, 1.0)


@law("alpha-beta model: where both terms are equal", ranks=256, bytes_per_s=IB, latency_s=ALPHA)
def ring_break_even_bytes(ranks: Positive, bytes_per_s: Positive, latency_s: NonNegative) -> float:
    """Buffer at which a ring spends as long on latency as on bandwidth: N alpha beta. Below it a tree is the better choice."""
    return ranks * latency_s * bytes_per_s


@law("communication over computation", communication_s=0.5604, compute_s=5.0)
def communication_ratio(communication_s: NonNegative, compute_s: Positive) -> float:
    """rho = T_comm / T_compute: above 1 a step is bound by communication."""
    return communication_s / compute_s


@law("nothing overlaps", compute_s=1.2, communication_s=28.0)
def serial_efficiency(compute_s: Positive, communication_s: NonNegative) -> float:
    """Scaling efficiency without overlap: T_compute / (T_compute + T_comm)."""
    return compute_s / (compute_s + communication_s)


@law("ratio of link rates", fast_bytes_per_s=450e9, slow_bytes_per_s=IB)
def link_ratio(fast_bytes_per_s: Positive, slow_bytes_per_s: Positive) -> float:
    """How many times faster one link is: beta_1 / beta_2."""
    return fast_bytes_per_s / slow_bytes_per_s


@law("NCCL tests, performance notes: bus bandwidth", size_bytes=14e9, ranks=256, duration_s=0.5604)
def bus_bytes_per_s(size_bytes: Positive, ranks: OneToInfinity, duration_s: Positive) -> float:
    """Bus bandwidth of a measured all-reduce, comparable between numbers of ranks: S / t x 2 (N-1)/N."""
    return size_bytes / duration_s * 2.0 * (1.0 - 1.0 / ranks)


@law("folded Clos: bisection over injection", ports_up=16, ports_down=32)
def oversubscription_share(ports_up: Positive, ports_down: Positive) -> float:
    """Share of its injection bandwidth that a node keeps across a tapered tree: up / down, at most 1."""
    return where(ports_up < ports_down, ports_up / ports_down, 1.0)

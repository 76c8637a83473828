"""The rates that one accelerator can reach, and the used share of them."""

from __future__ import annotations

from fleet.laws.law import NonNegative, Positive, PositiveShare, law, minimum

ROOFLINE = "Williams et al. 2009, CACM 52(4)"
PALM = "Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B"
PEAK, HBM = 989e12, 3.35e12


@law(ROOFLINE, peak_flop_per_s=PEAK, bytes_per_s=HBM)
def ridge_flop_per_byte(peak_flop_per_s: Positive, bytes_per_s: Positive) -> float:
    """Arithmetic intensity at which memory and arithmetic are both busy: peak / bandwidth."""
    return peak_flop_per_s / bytes_per_s


@law(ROOFLINE, intensity=100.0, peak_flop_per_s=PEAK, bytes_per_s=HBM)
def attainable_flop_per_s(intensity: NonNegative, peak_flop_per_s: Positive, bytes_per_s: Positive) -> float:
    """min(peak, intensity x bandwidth), intensity in FLOP/B."""
    return minimum(peak_flop_per_s, intensity * bytes_per_s)


@law(ROOFLINE, work_flop=2e15, moved_bytes=16e9, peak_flop_per_s=PEAK, bytes_per_s=HBM)
def kernel_s(work_flop: NonNegative, moved_bytes: NonNegative, peak_flop_per_s: Positive, bytes_per_s: Positive) -> float:
    """Least time of a kernel: max(FLOP / peak, bytes / bandwidth)."""
    arithmetic, memory = work_flop / peak_flop_per_s, moved_bytes / bytes_per_s
    return -minimum(-arithmetic, -memory)


@law(PALM, tokens_per_s=6.67e6, flop_per_token=6e12, gpus=100_000, peak_flop_per_s=1e15)
def mfu(tokens_per_s: NonNegative, flop_per_token: Positive, gpus: Positive, peak_flop_per_s: Positive) -> float:
    """Model FLOP utilisation: tokens/s x FLOP of the model per token / (N x peak). Recomputed activations do not count."""
    return tokens_per_s * flop_per_token / (gpus * peak_flop_per_s)


@law(f"{PALM}; Korthikanti et al. 2022, arXiv 2205.05198", mfu=0.4, recompute_share=1.0)
def hfu(mfu: NonNegative, recompute_share: NonNegative) -> float:
    """Hardware FLOP utilisation: MFU x (3 + recomputed share of the forward pass) / 3."""
    return mfu * (3.0 + recompute_share) / 3.0


@law("memory-bound decoding: every weight is read for every token", parameters=8.03e9, bytes_per_s=HBM)
def decode_tokens_per_s(parameters: Positive, bytes_per_s: Positive, bytes_per_parameter: Positive = 2.0) -> float:
    """Tokens per second of one sequence at batch 1: bandwidth / (parameters x bytes of one)."""
    return bytes_per_s / (parameters * bytes_per_parameter)


@law("two FLOP a weight and sequence", batch=1)
def decode_flop_per_byte(batch: Positive, bytes_per_parameter: Positive = 2.0) -> float:
    """Arithmetic intensity of decoding: 2 x batch / bytes of a parameter."""
    return 2.0 * batch / bytes_per_parameter


@law("of the data sheet's dense peak", gpus=25_000, peak_flop_per_s=PEAK)
def fleet_flop_per_s(gpus: Positive, peak_flop_per_s: Positive, utilisation: PositiveShare = 1.0) -> float:
    """Peak of a fleet, times its utilisation: N x peak x utilisation."""
    return gpus * peak_flop_per_s * utilisation

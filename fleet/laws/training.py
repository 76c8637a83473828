"""The cost of training a model, and its best size."""

from __future__ import annotations

from fleet.laws.law import DAY_S, NonNegative, Positive, PositiveShare, law, power, sqrt

KAPLAN = "Kaplan et al. 2020, arXiv 2001.08361, sec. 2.1"
CHINCHILLA = "Hoffmann et al. 2022, arXiv 2203.15556"
TOKENS_PER_PARAMETER = 20.0
LOSS_E, LOSS_A, LOSS_B, LOSS_ALPHA, LOSS_BETA = 1.69, 406.4, 410.7, 0.34, 0.28


@law(KAPLAN, parameters=70.6e9, tokens=15e12)
def training_flop(parameters: Positive, tokens: Positive) -> float:
    """FLOP of a training run: 6 x parameters x tokens (2 forward, 4 backward). Parameters are those that a token meets."""
    return 6.0 * parameters * tokens


@law("Narayanan et al. 2021, arXiv 2104.04473, sec. 5.1; Chowdhery et al. 2022, appendix B", layers=80, width=8192, sequence=8192)
def attention_flop(layers: Positive, width: Positive, sequence: Positive) -> float:
    """FLOP of attention scores per token, forward and backward: 12 x layers x width x sequence; half with a causal kernel."""
    return 12.0 * layers * width * sequence


@law(f"{CHINCHILLA}: about 20 tokens a parameter", parameters=70e9)
def compute_optimal_tokens(parameters: Positive) -> float:
    """Tokens at which a model of this size is compute-optimal: 20 x parameters."""
    return TOKENS_PER_PARAMETER * parameters


@law(f"{CHINCHILLA}, with 6 FLOP a parameter and token", work_flop=5.88e23)
def compute_optimal_parameters(work_flop: Positive) -> float:
    """Parameters of the compute-optimal model for a budget: sqrt(C / (6 x 20))."""
    return sqrt(work_flop / (6.0 * TOKENS_PER_PARAMETER))


@law(f"{CHINCHILLA}, eq. 10", parameters=70e9, tokens=1.4e12)
def chinchilla_loss(parameters: Positive, tokens: Positive) -> float:
    """Loss in nats a token: 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28."""
    return LOSS_E + LOSS_A * power(parameters, -LOSS_ALPHA) + LOSS_B * power(tokens, -LOSS_BETA)


@law("rate of FLOP over FLOP per token", gpus=100_000, peak_flop_per_s=1e15, mfu=0.4, parameters=1e12)
def training_tokens_per_s(
    gpus: Positive, peak_flop_per_s: Positive, mfu: PositiveShare, parameters: Positive, flop_per_parameter: Positive = 6.0
) -> float:
    """Tokens per second: N x peak x MFU / (6 x parameters)."""
    return gpus * peak_flop_per_s * mfu / (flop_per_parameter * parameters)


@law("86,400 s", tokens_per_s=6.67e6)
def tokens_a_day(tokens_per_s: NonNegative) -> float:
    """Tokens in 24 h: rate x 86,400 s."""
    return tokens_per_s * DAY_S


@law("work over rate; goodput stretches it", tokens=15e12, tokens_per_s=6.67e6, goodput=1.0)
def training_time_s(tokens: Positive, tokens_per_s: Positive, goodput: PositiveShare = 1.0) -> float:
    """Wall clock of a run: tokens / (tokens per second x goodput)."""
    return tokens / (tokens_per_s * goodput)

"""Watts, heat, carbon and money."""

from __future__ import annotations

from fleet.laws.law import AtLeastOne, NonNegative, Positive, floor, law

PUE = "The Green Grid 2007: PUE = facility energy / IT energy (ISO/IEC 30134-2)"
AIR_LIMIT_W = 30_000.0
"""Power of a rack above which air cooling becomes impractical: Machine Learning Systems (textbook), vol. 2; mlsysim 0.3.0."""
AIR_J_PER_M3_K = 1.2 * 1005.0
"""Heat that a cubic metre of air at 20 °C takes per kelvin: density x specific heat."""
JOULE_PER_KWH = 3.6e6


@law("data sheet power x count", gpus=10_000, gpu_w=700)
def fleet_power_w(gpus: NonNegative, gpu_w: Positive, pue: AtLeastOne = 1.0) -> float:
    """Power of a fleet: N x W of one x PUE."""
    return gpus * gpu_w * pue


@law(PUE, it_w=1e6, pue=1.12)
def overhead_w(it_w: NonNegative, pue: AtLeastOne) -> float:
    """Power for cooling and conversion: IT power x (PUE - 1)."""
    return it_w * (pue - 1.0)


@law(PUE, it_w=10e6, pue=1.58)
def facility_w(it_w: NonNegative, pue: AtLeastOne) -> float:
    """Power of the facility: IT power x PUE."""
    return it_w * pue


@law("energy = power x time", power_w=9.8e6, duration_s=54 * 86_400.0)
def energy_kwh(power_w: NonNegative, duration_s: NonNegative) -> float:
    """Energy: W x s / 3.6e6."""
    return power_w * duration_s / JOULE_PER_KWH


@law("GHG Protocol, scope 2, location-based", used_kwh=1e6, g_per_kwh=480.0)
def carbon_kg(used_kwh: NonNegative, g_per_kwh: NonNegative) -> float:
    """Emissions: kWh x g CO2/kWh / 1000."""
    return used_kwh * g_per_kwh / 1000.0


@law("ratio of carbon intensities", dirty_g_per_kwh=800.0, clean_g_per_kwh=20.0)
def carbon_ratio(dirty_g_per_kwh: NonNegative, clean_g_per_kwh: Positive) -> float:
    """Emissions of one grid over those of another for the same energy."""
    return dirty_g_per_kwh / clean_g_per_kwh


@law("energy per bit", size_bytes=700e9, j_per_bit=15e-12)
def transfer_j(size_bytes: NonNegative, j_per_bit: NonNegative) -> float:
    """Energy to move bytes over a link: 8 x bytes x J/bit."""
    return 8.0 * size_bytes * j_per_bit


@law("ratio of energies per bit", old_j_per_bit=10e-12, new_j_per_bit=5e-12)
def optics_ratio(old_j_per_bit: NonNegative, new_j_per_bit: Positive) -> float:
    """Energy of the old link over that of a better one."""
    return old_j_per_bit / new_j_per_bit


@law("work over energy", rate_flop_per_s=2.47e19, power_w=17.5e6)
def flop_per_j(rate_flop_per_s: NonNegative, power_w: Positive) -> float:
    """Energy productivity: FLOP/s / W."""
    return rate_flop_per_s / power_w


@law("rental price x time", gpus=16_384, duration_s=54 * 86_400.0, usd_per_gpu_hour=2.0)
def rental_usd(gpus: NonNegative, duration_s: NonNegative, usd_per_gpu_hour: NonNegative) -> float:
    """Rent: N x hours x USD per GPU-hour."""
    return gpus * duration_s / 3600.0 * usd_per_gpu_hour


@law("energy price x energy", used_kwh=1e6, usd_per_kwh=0.08)
def energy_usd(used_kwh: NonNegative, usd_per_kwh: NonNegative) -> float:
    """Price of energy: kWh x USD/kWh."""
    return used_kwh * usd_per_kwh


@law("sum of its nodes", nodes=4, node_w=10_200.0)
def rack_w(nodes: NonNegative, node_w: Positive) -> float:
    """Power of a rack: nodes x W of one."""
    return nodes * node_w


@law("air-cooling limit of about 30 kW a rack: Machine Learning Systems (textbook), vol. 2, appendix Fleet", node_w=10_200.0)
def air_cooled_nodes(node_w: Positive, limit_w: Positive = AIR_LIMIT_W) -> float:
    """Nodes that one rack can hold and still be cooled by air: floor(limit / W of one); 0: a single node needs liquid."""
    return floor(limit_w / node_w)


@law("sensible heat: ASHRAE Handbook, Fundamentals", power_w=AIR_LIMIT_W, rise_k=15.0)
def airflow_m3_per_s(power_w: NonNegative, rise_k: Positive) -> float:
    """Air that carries the heat away when it warms by ``rise_k``: W / (density x specific heat x rise)."""
    return power_w / (AIR_J_PER_M3_K * rise_k)

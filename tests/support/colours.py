"""Colours as dichromats see them, and how far apart two look.

Simulated after Vienot, Brettel and Mollon, "Digital video colourmaps for checking the legibility of displays by dichromats", Color Research
and Application 24 (1999): the response of the cones that are missing is what the other two give for it. Differences are CIE 1976's, in
CIELAB under D65; 2.3 is the least that people notice side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Triple = NDArray[np.float64]
CONES = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
"""Linear RGB to the responses of long, middle and short cones (Vienot et al., equation 4)."""
MISSING = {
    "nothing": np.eye(3),
    "protanopia": np.array([[0.0, 2.02344, -2.52581], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
    "deuteranopia": np.array([[1.0, 0.0, 0.0], [0.494207, 0.0, 1.24827], [0.0, 0.0, 1.0]]),
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
"""Linear sRGB to CIE XYZ (IEC 61966-2-1)."""


def linear(colour: str) -> Triple:
    """``#rrggbb`` as light, 0 to 1 each."""
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def seen(colour: str, missing: str = "nothing") -> Triple:
    """CIELAB of a colour for those who lack what is ``missing``."""
    light = np.clip(np.linalg.inv(CONES) @ MISSING[missing] @ CONES @ linear(colour), 0.0, 1.0)
    share = XYZ @ light / XYZ.sum(axis=1)
    x, y, z = np.where(share > 216 / 24389, np.cbrt(share), (24389 / 27 * share + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str) -> float:
    """How far apart two colours look to whoever sees the least difference."""
    return min(float(np.linalg.norm(seen(one, missing) - seen(other, missing))) for missing in MISSING)


def too_close(colours: Mapping[str, str], least: float) -> list[tuple[str, str, float]]:
    """Pairs of names whose colours look less than ``least`` apart."""
    pairs = ((a, b, round(distance(colours[a], colours[b]), 1)) for a, b in itertools.combinations(colours, 2))
    return [pair for pair in pairs if pair[2] < least]

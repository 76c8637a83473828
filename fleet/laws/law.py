"""Common code of all laws: it checks inputs by name, maps arrays to arrays, and lets no result out that is not finite.

A law is a pure function over plain numbers. Its annotations give the domain of each input (:data:`Positive`, :data:`Share` ...). Its name
ends in the unit of its result (none: a ratio or a count), and its docstring begins with the formula. :func:`law` adds the source, and one
worked example, which ``docs/laws.md`` shows with its result.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, cast, get_type_hints, overload

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

HOUR_S, DAY_S = 3600.0, 86_400.0

Unary = Callable[[float], float]
Binary = Callable[[float, float], float]
sqrt, exp, expm1 = cast(Unary, np.sqrt), cast(Unary, np.exp), cast(Unary, np.expm1)
log, log2, floor, ceil = cast(Unary, np.log), cast(Unary, np.log2), cast(Unary, np.floor), cast(Unary, np.ceil)
power, maximum, minimum = cast(Binary, np.power), cast(Binary, np.maximum), cast(Binary, np.minimum)


def where(condition: bool, yes: float, no: float) -> float:
    """``yes`` where ``condition`` holds, ``no`` elsewhere; numbers or arrays."""
    return cast(float, np.where(condition, yes, no)[()])


@dataclass(frozen=True, slots=True)
class Domain:
    """low..high, without ``low`` itself when ``open``, whole numbers only when ``whole``. Infinity only where ``infinite``."""

    low: float
    high: float = math.inf
    open: bool = False
    whole: bool = False
    infinite: bool = False

    def check(self, field: str, value: Any) -> None:
        """Raises ConfigError when ``value``, or the first bad element of it, lies outside."""
        if type(value) in (float, int):
            if not self._holds(value):
                self._refuse(field, value)
            return
        for item in np.asarray(value, dtype=np.float64).ravel()[~self._mask(value)][:1]:
            self._refuse(field, float(item))

    def _holds(self, value: float) -> bool:
        inside = self.low < value <= self.high if self.open else self.low <= value <= self.high
        return inside and (self.infinite or value != math.inf) and (not self.whole or value == math.inf or value == math.floor(value))

    def _mask(self, value: Any) -> NDArray[np.bool_]:
        items = np.asarray(value, dtype=np.float64).ravel()
        inside = (items > self.low if self.open else items >= self.low) & (items <= self.high)
        finite = np.full(items.shape, True) if self.infinite else np.isfinite(items)
        return np.asarray(inside & finite & (not self.whole or items == np.floor(items)), dtype=np.bool_)

    def _refuse(self, field: str, value: float) -> None:
        finite = "" if self.infinite else "finite and "
        above = f"greater than {self.low:g}" if self.open else f"at least {self.low:g}"
        below = "" if self.high == math.inf else f" and at most {self.high:g}"
        raise ConfigError(field, value, f"must be {finite}{above}{below}{', a whole number' if self.whole else ''}", self._way_out(value))

    def _way_out(self, value: float) -> str:
        if math.isnan(value):
            return "It is not a number: look where it was computed."
        nearest = min(max(value, self.low), self.high)
        if math.isinf(nearest):
            return "It must be finite: look where it was computed."
        if self.open and nearest <= self.low:  # no value is the nearest
            return f"Any value greater than {self.low:g} will do, such as {min(self.low + 1.0, self.high):g}."
        return f"The nearest valid value is {max(round(nearest), math.ceil(self.low)) if self.whole else nearest:g}."


Positive = Annotated[float, Domain(0.0, open=True)]
NonNegative = Annotated[float, Domain(0.0)]
Share = Annotated[float, Domain(0.0, 1.0)]
PositiveShare = Annotated[float, Domain(0.0, 1.0, open=True)]
Probability = Annotated[float, Domain(0.0, math.nextafter(1.0, 0.0))]
AtLeastOne = Annotated[float, Domain(1.0)]
OneToInfinity = Annotated[float, Domain(1.0, infinite=True)]
Count = Annotated[int, Domain(1, whole=True)]
CountOrZero = Annotated[int, Domain(0, whole=True)]
Real = Annotated[float, Domain(-math.inf)]


@dataclass(frozen=True, slots=True)
class Law:
    """One entry of the registry. ``example`` are the keyword arguments of the worked example."""

    function: Callable[..., Any]
    source: str
    example: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Module and function, e.g. ``checkpointing.young_work_s``."""
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"


REGISTRY: dict[str, Law] = {}


class Vectorised(Protocol[P, R_co]):
    """A law: floats give the annotated type of result, an array anywhere gives an array of the broadcast shape."""

    __name__: str
    __wrapped__: Callable[..., Any]

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def law(
    source: str, *, elementwise: bool = False, alone: bool = False, **example: Any
) -> Callable[[Callable[P, R_co]], Vectorised[P, R_co]]:
    """Register a law with its source and the arguments of one worked example.

    ``elementwise``: the body is for single numbers and runs for every element of an array. ``alone``: the answer is not a number, and the
    law refuses arrays.
    """

    def decorate(function: Callable[P, R_co]) -> Vectorised[P, R_co]:
        names, domains = _domains(function)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Any:
            given = [*zip(names, args, strict=False), *kwargs.items()]
            for name, value in given:
                if name in domains:
                    domains[name].check(name, value)
            arrays = any(isinstance(value, np.ndarray) or (name in domains and isinstance(value, list)) for name, value in given)
            if alone and arrays:
                _refuse_arrays(given)
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                result = _apply(function, args, kwargs, domains, names, elementwise) if arrays else _guarded(function, args, kwargs)
            return _finite(function.__name__, result, given)

        entry = Law(checked, source, example)
        REGISTRY[entry.name] = entry
        return cast(Vectorised[P, R_co], checked)

    return decorate


def _refuse_arrays(given: Iterable[tuple[str, Any]]) -> None:
    name, value = next((name, value) for name, value in given if isinstance(value, (np.ndarray, list)))
    raise ConfigError(name, value, "one number at a time: the answer is no number, so there is no array of it", "Call it once for each.")


def _domains(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Domain]]:
    hints = get_type_hints(function, include_extras=True)
    found = {name: meta for name, hint in hints.items() for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Domain)}
    return tuple(inspect.signature(function).parameters), {name: domain for name, domain in found.items() if name != "return"}


def _guarded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except (OverflowError, ZeroDivisionError):
        return math.inf


def _apply(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], domains: Mapping[str, Domain],
           names: tuple[str, ...], elementwise: bool) -> Any:  # fmt: skip
    """Numbers as float64 arrays; with ``elementwise``, one call for each element."""
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    numbers = {name: np.asarray(value, dtype=np.float64) for name, value in values.items() if name in domains}
    each = np.broadcast(*numbers.values())
    if not elementwise:
        result = function(**(values | numbers))
        return np.full(each.shape, result) if isinstance(result, float) else result
    results = [_guarded(function, (), values | dict(zip(numbers, map(float, items), strict=True))) for items in each]
    return _joined(results, each.shape)


def _joined(results: list[Any], shape: tuple[int, ...]) -> Any:
    """Numbers as an array; records as one record of arrays."""
    first = results[0] if results else math.nan
    if not dataclasses.is_dataclass(first) or isinstance(first, type):
        return np.array(results, dtype=np.float64).reshape(shape)
    columns = {f.name: [getattr(result, f.name) for result in results] for f in dataclasses.fields(first)}
    return dataclasses.replace(first, **{name: np.array(column).reshape(shape) for name, column in columns.items()})


def _finite(name: str, result: Any, given: Iterable[tuple[str, Any]]) -> Any:
    if isinstance(result, (float, np.floating)):
        if math.isfinite(result):
            return float(result)
    elif all(np.all(np.isfinite(number)) for number in _numbers(result)):
        return _plain(result) if dataclasses.is_dataclass(result) and not isinstance(result, type) else result
    inputs = ", ".join(f"{key} = {value!r}" for key, value in given)
    raise ConfigError(name, result, f"not a finite number for {inputs}", "These inputs lie outside the range of the formula.")


def _plain(result: Any) -> Any:
    """The same record with Python's own floats."""
    changed = {f.name: value.item() for f in dataclasses.fields(result) if isinstance(value := getattr(result, f.name), np.generic)}
    return dataclasses.replace(result, **changed) if changed else result


def _numbers(result: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(result):
        yield from (number for field in dataclasses.fields(result) for number in _numbers(getattr(result, field.name)))
    elif isinstance(result, Mapping):
        yield from (number for value in result.values() for number in _numbers(value))
    elif isinstance(result, (tuple, list)):
        yield from (number for value in result for number in _numbers(value))
    elif isinstance(result, (float, int, np.ndarray, np.floating)):
        yield result

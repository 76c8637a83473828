"""Train functions that are in no file: closures, lambdas, those of a notebook or of ``__main__``. They go to ranks by value."""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from actors.rank.shipped import Shipped
from fleet.errors import ConfigError
from fleet.host.packages import PACKAGES

_pickling = threading.Lock()
"""The modules that are pickled by value are the same for the whole process."""
MOST_BYTES = 256 * 2**20
"""Every rank gets a function through Ray's object store, of which a node of the local cluster has 80 MB in memory."""


def ship(train: Callable[..., Any], field: str = "train") -> Shipped:
    """``train`` as bytes, with its module's other functions and values that it uses. ``field``: the name of the user's argument.

    Raises:
        ConfigError: it cannot be called with the run alone, or it holds an object that cannot be sent to another process.
    """
    check_callable(train, field, (None,))
    return packed(train, train, field)


def check_callable(train: Any, field: str, arguments: tuple[Any, ...]) -> None:
    """Raises ConfigError when ``train`` is no plain function, or cannot be called with these ``arguments``."""
    if not callable(train) or inspect.iscoroutinefunction(train) or inspect.isgeneratorfunction(train):
        raise ConfigError(field, name_of(train), "it is no plain function", "Give a function that trains when it is called.")
    try:
        inspect.signature(train).bind(*arguments)
    except TypeError as error:
        raise ConfigError(field, name_of(train), f"it cannot be called with {len(arguments)} argument(s): {error}") from error


def packed(called: Callable[[Any], None], train: Callable[..., Any], field: str) -> Shipped:
    """``called``, which holds the user's function ``train``, as bytes. Raises ConfigError."""
    from ray import cloudpickle

    name = name_of(train)
    _name_modules()
    try:
        with _by_value(_module_of(train)):
            pickled = bytes(cloudpickle.dumps(called))
    except Exception as error:  # a user's object may raise anything when it is pickled
        way_out = "Make it inside the function: open files, locks, threads, sockets and clients stay where they are."
        raise ConfigError(field, name, f"it cannot be sent to ranks: {type(error).__name__}: {error}", way_out) from error
    if len(pickled) > MOST_BYTES:
        reason = f"it holds {len(pickled):,} bytes, and at most {MOST_BYTES:,} are sent to each rank"
        raise ConfigError(field, name, reason, "Let ranks read data from files: give the function a path, and not the data.")
    return Shipped(name, pickled)


def _name_modules() -> None:
    """Pickle modules by name also when they have a class of their own, such as ``torch.backends.cudnn``."""
    for module in list(sys.modules.values()):
        kind = type(module)
        if isinstance(module, ModuleType) and kind.__reduce__ is object.__reduce__ and kind is not ModuleType:
            copyreg.pickle(kind, _by_name)


def _by_name(module: ModuleType) -> tuple[Callable[[str], ModuleType], tuple[str]]:
    return importlib.import_module, (module.__name__,)


def name_of(train: object) -> str:
    """The name by which users know the function."""
    return str(getattr(_function(train), "__qualname__", type(train).__qualname__))


def _function(train: Any) -> Any:
    while isinstance(train, functools.partial):
        train = train.func
    return getattr(train, "__func__", train)


def _module_of(train: Any) -> ModuleType | None:
    """The user's module of the function, which travels with it; None for a module of a library or of Fleet's."""
    module = sys.modules.get(getattr(_function(train), "__module__", None) or "")
    if module is None or _stays(module):
        return None
    return module


def _stays(module: ModuleType) -> bool:
    top = module.__name__.partition(".")[0]
    return top in sys.stdlib_module_names or top in PACKAGES or module.__name__ == "__main__"


@contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Pickle the parts of ``module`` by value meanwhile, and then as before."""
    from ray import cloudpickle

    with _pickling:
        if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
            yield
            return
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)

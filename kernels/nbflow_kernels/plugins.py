"""Plugins: Python files, or installed packages, that register parts of a user's own.

A plugin is code that runs with the user's rights.  It is imported only where the user names it: by
``--plugins``, in a sweep or server configuration, or in a call of `load_plugin`.  Checkpoints,
specs and requests refer to what a plugin has registered, by name; they cannot cause an import.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from nbflow_kernels.errors import UsageError, unknown_name

GROUP = "nbflow.plugins"
"""Entry point group of installed plugins."""
_MAX_BYTES = 2**24


@dataclass(frozen=True)
class Registration:
    """One thing that a plugin has registered."""

    kind: str
    """"format", "decoding strategy", "measure", "attention variant" or "op"."""
    name: str
    is_present: Callable[[], bool]
    """False after it was removed or replaced."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Plugin:
    """A plugin that this process has imported."""

    path: Path
    """The file; of a package the file of the module that its entry point names."""
    sha256: str
    """Digest of this file, not of files that it imports."""
    module: ModuleType
    registered: tuple[Registration, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """Plain data for provenance."""
        return {
            "path": str(self.path),
            "sha256": self.sha256,
            "registers": sorted(set(map(str, self.registered))),
        }


_loaded: dict[tuple[Path, str], Plugin] = {}
_noted: list[Registration] = []
"""Registrations of the plugin that is being imported."""


def note(kind: str, name: str, is_present: Callable[[], bool]) -> None:
    """Record a registration; every ``register_`` function calls it."""
    _noted.append(Registration(kind, name, is_present))


def load_plugin(source: str | Path) -> Plugin:
    """Import a plugin, once for each content of its file.

    A plugin is a program and can do anything that you can: load only what you trust.

    Parameters
    ----------
    source : str or Path
        A Python file (``.py``), or the name of an entry point of the group ``nbflow.plugins``.

    Returns
    -------
    Plugin
        Its file, the file's SHA-256 and what it has registered.

    Raises
    ------
    UsageError
        If the file or entry point does not exist, raises, or registers nothing.
    """
    if not str(source).endswith(".py") and not Path(source).is_file():
        return _load_entry_point(str(source))
    path = Path(source).resolve()
    digest = _digest(path, source)

    def execute() -> ModuleType:
        name = f"nbflow_plugin_{digest[:16]}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UsageError("a plugin must be Python (.py)")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        # not the loader, whose .pyc files hide an edit of the same size within the same second
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
        return module

    return _load(path, digest, source, execute)


def load_plugins(sources: Iterable[str | Path]) -> tuple[Plugin, ...]:
    """Import several plugins; see `load_plugin`."""
    return tuple(map(load_plugin, sources))


def loaded_plugins() -> list[Plugin]:
    """Return the plugins that this process has imported, in order."""
    return list(_loaded.values())


def find_object(reference: str, where: str) -> Any:
    """Return the object that ``FILE.py:NAME`` names in a plugin that has been imported.

    FILE is the name of the plugin's file, with as much of its path as is needed to tell it from
    others.  The file is not imported if it is not a plugin: the user has to name it as one.

    Raises
    ------
    UsageError
        If such a plugin has not been imported, or has no such name.
    """
    file, _, name = reference.rpartition(":")
    parts = tuple(part for part in Path(file).parts if part not in (".", "/"))
    found = [p for p in loaded_plugins() if parts and p.path.parts[-len(parts) :] == parts]
    found = [p for p in found if all(each.is_present() for each in p.registered)]
    if not found:
        raise UsageError(
            f"{where}: {reference!r:.120} is in a file that is not a plugin of this run; files are "
            f"imported only where you name them: --plugins {file:.120}"
        )
    plugin = found[-1]  # the latest content of an edited file
    if len({p.path for p in found}) > 1:
        paths = ", ".join(sorted({str(p.path) for p in found}))
        raise UsageError(f"{where}: {file:.120} may be {paths}; write more of its path")
    if not hasattr(plugin.module, name):
        raise UsageError(f"{where}: {plugin.path} has no {name!r:.120}")
    return getattr(plugin.module, name)


def _digest(path: Path, source: str | Path) -> str:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise UsageError(f"plugin {source}: has {size} bytes; at most {_MAX_BYTES} are read")
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read the plugin {source}: {error.strerror}") from None


def _load_entry_point(name: str) -> Plugin:
    known = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if name not in known:
        problem = unknown_name("plugin", name, known)
        raise UsageError(
            f"{problem} (entry points of {GROUP}); a plugin of your own is a file: NAME.py"
        )
    found = importlib.util.find_spec(known[name].module)
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise UsageError(f"plugin {name}: module {known[name].module} cannot be found")
    path = Path(found.origin).resolve()

    def execute() -> ModuleType:
        made = known[name].load()
        if callable(made):  # an entry point "module:function" registers when it is called
            made()
        return sys.modules[known[name].module]

    return _load(path, _digest(path, name), name, execute)


def _load(path: Path, digest: str, source: str | Path, execute: Callable[[], ModuleType]) -> Plugin:
    """Run a plugin and record what it registers."""
    known = _loaded.get((path, digest))
    if known is not None and all(each.is_present() for each in known.registered):
        return known
    _noted.clear()
    try:
        module = execute()
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    except Exception as error:
        raise UsageError(f"{source} raised {type(error).__name__}: {error}") from error
    registered = tuple(_noted)
    _noted.clear()
    if not registered:
        raise UsageError(
            f"{source} registers nothing; a plugin calls register_format, register_strategy, "
            "register_measure, register_attention or register_op"
        )
    _loaded[path, digest] = Plugin(path, digest, module, registered)
    return _loaded[path, digest]


ThingT = TypeVar("ThingT")


class Registry(Mapping[str, ThingT], Generic[ThingT]):
    """Things of one kind that plugins register under a name.

    Parameters
    ----------
    kind : str
        The kind, for messages.
    function : str
        Name of the function that registers.
    """

    def __init__(self, kind: str, function: str) -> None:
        self._kind, self._function = kind, function
        self._things: dict[str, ThingT] = {}
        self._modules: dict[str, str] = {}

    def add(self, name: str, thing: ThingT, source: Any) -> None:
        """Register a thing; code of the same module replaces what it has registered before.

        `source` is the function or class whose module counts.
        """
        if not name.replace("_", "a").replace(".", "a").isalnum():
            raise UsageError(
                f"{self._kind} {name!r}: a name is letters, digits, underscores and dots"
            )
        module = getattr(source, "__module__", "")
        if self._modules.get(name, module) != module:
            raise UsageError(
                f"{self._kind} {name!r} is registered already, by other code; choose another name"
            )
        self._things[name], self._modules[name] = thing, module
        note(self._kind, name, functools.partial(self._holds, name, thing))

    def _holds(self, name: str, thing: ThingT) -> bool:
        return self._things.get(name) is thing

    def remove(self, name: str) -> None:
        """Remove a thing."""
        self[name]
        del self._things[name], self._modules[name]

    def __getitem__(self, name: str) -> ThingT:
        if name not in self._things:
            raise self.unknown(name)
        return self._things[name]

    def unknown(self, name: str) -> UsageError:
        """Return the error for an unknown name."""
        return UsageError(
            f"{unknown_name(self._kind, name, self._things)} (a plugin adds one with "
            f"{self._function}; name it: --plugins FILE.py)"
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Return the thing of that name, or `default`."""
        return self._things.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

"""Install packages of techniques, without pip or a network: write their metadata and add them to the module path."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.params import catalogue, outside

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_technique"


def write_metadata(target: Path, name: str, version: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Write a package's metadata as an installation does. ``points``: its entry points, group -> name -> value."""
    metadata = target / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{point} = {value}\n" for point, value in values.items())
        for group, values in points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))


def write_techniques(target: Path, module: str, code: str, entries: Iterable[str]) -> None:
    """Write a package of techniques with the one module ``module``. Technique ``a_name`` has the class ``AName``."""
    (target / f"{module}.py").write_text(code, encoding="utf-8")
    names = list(entries)
    points = {
        outside.CATALOGUE: {name: f"{module}:{name}" for name in names},
        outside.TECHNIQUES: {name: f"{module}:{name.title().replace('_', '')}" for name in names},
    }
    write_metadata(target, module, "1.0", points)


def write_example_metadata(target: Path, version: str | None = None) -> None:
    """Write the example package's metadata, as its pyproject.toml declares it."""
    about = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    write_metadata(target, about["name"], version or about["version"], about["entry-points"])


@contextmanager
def on_path(*folders: Path) -> Iterator[None]:
    """Add the folders to ``sys.path`` while the block runs. Before and after, clear the caches of packages."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        forget()
        yield
    forget()


def forget() -> None:
    importlib.invalidate_caches()
    outside._points.cache_clear()
    catalogue._from_outside.cache_clear()

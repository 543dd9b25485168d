"""The layers of autoremat, kept.

    graph <- cost <- solve <- plan <- cli      graph (its tracer aside), cost, solve and report know no JAX
    transform, storage, target, measure, predict   JAX lives here, and behind one file, _compat.py
    report                                     views of plain data: plan shows a plan with it, cli everything

The tables below say the same to the test.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "autoremat"

# A folder of src/autoremat, and the folders that it may import.
LAYERS: dict[str, set[str]] = {
    "graph": set(),
    "cost": {"graph"},
    "solve": {"graph", "cost"},
    "storage": set(),
    "transform": {"graph", "cost", "solve", "storage"},
    "target": {"cost"},
    "measure": {"graph", "cost", "target"},
    "sharding": {"graph", "transform"},
    "predict": {"graph", "cost", "solve", "transform", "target", "sharding"},
    "plan": {
        "graph",
        "cost",
        "solve",
        "storage",
        "transform",
        "target",
        "measure",
        "sharding",
        "predict",
        "report",
    },
    "report": {"graph", "cost", "solve"},
    "cli": {
        "graph",
        "cost",
        "solve",
        "storage",
        "transform",
        "target",
        "measure",
        "sharding",
        "predict",
        "plan",
        "report",
    },
}
# The files beside the folders. All others, __init__.py among them, are the public surface: "autoremat".
FILES = {"_errors", "_compat", "_depth"}
MAY_USE = {
    "_errors": set(LAYERS) | {"_compat"},
    "_depth": {"transform", "_compat"},
    "_compat": {"transform", "target", "measure", "sharding", "predict", "plan"},
    "autoremat": {"cli"},
}
WITHOUT_JAX = {"graph", "cost", "solve", "report"}
TRACER = "autoremat.graph._trace"
JAX = {"jax", "jaxlib"}
MOVING_JAX = re.compile(r"jax\._src|jax\.interpreters|from jax import .*\b(_src|interpreters)\b")


class Import(NamedTuple):
    """`module` imports `target`, in `line`."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_names(node: ast.AST) -> list[str]:
    """What one node imports; of `from a import b` both `a` and `a.b`."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [module, *(f"{module}.{alias.name}" for alias in names)]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            return [module]
    return []


def imports(source: str, module: str) -> Iterator[Import]:
    """All imports of a source, those inside functions and under TYPE_CHECKING too.

    A target inside autoremat is the module that is meant: of `from autoremat.graph import Op` that is
    `autoremat.graph`, of `from autoremat import solve` it is `autoremat.solve`, not `autoremat`.
    """
    for node in ast.walk(ast.parse(source)):
        targets = imported_names(node)
        inside = [t for t in targets if t in MODULES]
        if isinstance(node, ast.ImportFrom) and len(inside) > 1 and len(inside) == len(targets):
            inside = inside[1:]  # every name is a module: the package itself is not used
        for target in inside or targets[:1]:
            yield Import(module, target, getattr(node, "lineno", 0))


ALL_IMPORTS = [found for name, path in MODULES.items() for found in imports(path.read_text("utf-8"), name)]


def layer(module: str) -> str:
    """The folder or the file beside the folders that a module of autoremat belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS.keys() | FILES else "autoremat"


def allowed(source: str, target: str) -> bool:
    if source in (target, "autoremat"):
        return True
    return source in MAY_USE[target] if target in MAY_USE else target in LAYERS.get(source, set())


def edges(found: list[Import]) -> list[tuple[str, str, Import]]:
    return [
        (layer(i.module), layer(i.target), i)
        for i in found
        if i.target == "autoremat" or i.target.startswith("autoremat.")
    ]


def without_jax(module: str) -> bool:
    return layer(module) in WITHOUT_JAX and module != TRACER


def test_every_folder_has_a_layer():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders <= LAYERS.keys(), "a new folder: give it a place in LAYERS"


def test_only_the_allowed_edges():
    bad = [str(found) for source, target, found in edges(ALL_IMPORTS) if not allowed(source, target)]
    assert bad == []


def test_data_flows_one_way():
    """The table itself has no cycle, nor have the folders as they are."""
    graphlib.TopologicalSorter(LAYERS).prepare()
    real: dict[str, set[str]] = {}
    for source, target, _ in edges(ALL_IMPORTS):
        if source not in (target, "autoremat"):
            real.setdefault(source, set()).add(target)
    real.pop("cli", None)  # the only one that may use the public surface, and nothing uses it but that
    graphlib.TopologicalSorter(real).prepare()


def test_layers_without_jax_import_none():
    bad = [
        str(found)
        for found in ALL_IMPORTS
        if without_jax(found.module) and (found.target.split(".")[0] in JAX or found.target == TRACER)
    ]
    assert bad == []


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("autoremat.solve._x", "import jax.numpy as jnp", "jax.numpy"),
        ("autoremat.solve._x", "def f():\n    from jax import lax", "jax"),
        ("autoremat.solve._x", "importlib.import_module('jax')", "jax"),
        ("autoremat.cost._x", "from autoremat import solve", "autoremat.solve"),
        ("autoremat.cost._x", "from autoremat.solve import solve_exactly", "autoremat.solve"),
        ("autoremat.cost._x", "if TYPE_CHECKING:\n    import autoremat.solve", "autoremat.solve"),
        ("autoremat.graph._x", "from autoremat import checkpoint", "autoremat"),
        ("autoremat.graph._x", "import autoremat._compat", "autoremat._compat"),
    ],
)
def test_the_scan_sees(module: str, source: str, target: str, monkeypatch: pytest.MonkeyPatch):
    """Each of these is an import that the tests above would refuse."""
    for name in ("autoremat", "autoremat.solve", "autoremat._compat"):
        monkeypatch.setitem(MODULES, name, Path())
    found = list(imports(source, module))
    assert [i.target for i in found] == [target]
    refused = [i for s, t, i in edges(found) if not allowed(s, t)]
    assert refused or (without_jax(module) and target.split(".")[0] in JAX)


def test_moving_jax_is_met_in_one_file():
    """`jax._src` and `jax.interpreters` stand in _compat.py only, in comments too."""
    paths = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    bad = [
        f"{path.relative_to(ROOT)}:{n}"
        for path in paths
        if path != PACKAGE / "_compat.py"
        for n, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if MOVING_JAX.search(line)
    ]
    assert bad == []


# `import autoremat.solve` first runs autoremat/__init__.py, which offers JAX things. A bare parent package in
# its place lets a subpackage be imported on its own.
IMPORT_ALONE = """
import importlib, sys, types
parent = types.ModuleType("autoremat")
parent.__path__ = [sys.argv[1]]
sys.modules["autoremat"] = parent
importlib.import_module("autoremat." + sys.argv[2])
print(sorted({"jax", "jaxlib"} & sys.modules.keys()))
"""


def loaded_by(folder: str) -> str:
    command = [sys.executable, "-c", IMPORT_ALONE, str(PACKAGE), folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("folder", sorted(WITHOUT_JAX))
def test_loads_no_jax(folder: str):
    assert loaded_by(folder) == "[]"


def test_loads_no_jax_can_fail():
    assert loaded_by("transform") == "['jax', 'jaxlib']"

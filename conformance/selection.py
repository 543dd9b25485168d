"""Which of JAX's tests touch rematerialization: read off the source text, without running anything.

A function touches it if its code, decorators included, uses an identifier that contains `remat`, `checkpoint` or
`saved_residuals`, or names a function, method or variable of the same file that does (`self.helper`, for a method).
Comments and strings do not count. A case is selected if its test function touches it; all cases of a class `RematTest`
are. A file is searched if it lies under `tests/` and holds such a function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TOUCHES = re.compile(r"remat|checkpoint|saved_residuals", re.IGNORECASE)
WHOLE_CLASS = "RematTest"


@dataclass(frozen=True, slots=True)
class Selection:
    """The test functions of one file that touch rematerialization, by the line at which each starts."""

    lines: frozenset[int]

    def __bool__(self) -> bool:
        return bool(self.lines)


def checkout_version(checkout: Path) -> str:
    """The version that a checkout of JAX's sources says it is."""
    text = (checkout / "jax" / "version.py").read_text()
    found = re.search(r'^_version\s*=\s*"([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{checkout / 'jax' / 'version.py'} assigns no _version.")
    return found[1]


def test_files(checkout: Path) -> list[str]:
    """The test files that touch rematerialization, relative to the checkout; that of `RematTest` first."""
    files = [p for p in sorted((checkout / "tests").rglob("*.py")) if TOUCHES.search(p.read_text())]
    found = [p.relative_to(checkout).as_posix() for p in files if select(p)]
    return sorted(found, key=lambda name: (name != "tests/api_test.py", name))


def select(path: Path) -> Selection:
    """The test functions in a file that touch rematerialization."""
    definitions = list(_definitions(ast.parse(path.read_text())))
    touching: set[str] = set()
    count = -1
    while len(touching) > count:
        count = len(touching)
        touching.update(d.handle for d in definitions if d.touches or d.uses & touching)
    lines = {
        d.line
        for d in definitions
        if d.is_test and (d.touches or d.uses & touching or d.owner == WHOLE_CLASS)
    }
    return Selection(frozenset(lines))


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """`(module, name)` of each `from jax... import name` at the top of a file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jax":
            yield from ((node.module, alias.name) for alias in node.names)


@dataclass(frozen=True, slots=True)
class _Definition:
    """A function, method or variable; `handle` is what others in the file refer to it by."""

    handle: str
    owner: str
    line: int
    is_test: bool
    touches: bool
    uses: frozenset[str]


def _definitions(module: ast.Module) -> Iterator[_Definition]:
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield _definition(node, node.name, "", node.name.startswith("test"))
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield _definition(part, f"self.{part.name}", node.name, part.name.startswith("test"))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield _definition(node, target.id, "", False)


def _definition(node: ast.stmt, handle: str, owner: str, is_test: bool) -> _Definition:
    names = frozenset(_identifiers(ast.walk(node)))
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return _Definition(
        handle=handle,
        owner=owner,
        line=min([node.lineno, *(d.lineno for d in decorators)]),
        is_test=is_test,
        touches=any(TOUCHES.search(name) for name in names),
        uses=names - {handle},
    )


def _identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                yield f"self.{node.attr}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias)):
            yield node.name
        elif isinstance(node, (ast.keyword, ast.arg)) and node.arg:
            yield node.arg

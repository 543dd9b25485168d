"""What the documents tell a reader to do, works.

Every ```python block of README.md and docs/*.md is executed, the blocks of one file in order and in one
namespace; those of docs/frameworks.md by section, in `test_frameworks.py`. A block that cannot be is marked in the
line before it: `<!-- not executed: reason -->`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import dev
import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
WITH_COMMANDS = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run"]

FENCE = re.compile(r"^\s*(```+)\s*([\w+-]*)")
NOT_EXECUTED = re.compile(r"<!--\s*not executed:\s*(.*?)\s*-->")
DEV = re.compile(r"\bdev\.py\s+([a-z][\w-]*)")
TEST_COMMAND = "<!-- test-command -->"


class Block(NamedTuple):
    """A fenced block: its language, its text, the number of its first line, the line that stands before it."""

    language: str
    text: str
    line: int
    before: str


def fenced_blocks(text: str) -> Iterator[Block]:
    before = fence = language = ""
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1] == fence and not mark[2]:
                yield Block(language, "\n".join(body), number - len(body), before)
                before = fence = ""
            else:
                body.append(line)
        elif mark:
            fence, language, body = mark[1], mark[2], []
        elif line.strip():
            before = line.strip()
    assert not fence, "a fenced block is not closed"


def python_blocks(text: str) -> Iterator[Block]:
    """The blocks to execute."""
    for block in fenced_blocks(text):
        if block.language == "python":
            exempt = NOT_EXECUTED.search(block.before)
            assert exempt is None or exempt[1], f"line {block.line}: 'not executed' without a reason"
            if exempt is None:
                yield block


@pytest.mark.parametrize(
    "path", [d for d in DOCUMENTS if d.name != "frameworks.md"], ids=lambda path: path.name
)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In an empty folder, so that a block may write files."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in python_blocks(path.read_text("utf-8")):
        padded = "\n" * (block.line - 1) + block.text  # a traceback shows the line of the document
        exec(compile(padded, str(path), "exec"), namespace)


def test_readme_has_python():
    assert list(python_blocks(README.read_text("utf-8"))), "README.md shows no example that runs"


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_exist(path: Path):
    named = set(DEV.findall(path.read_text("utf-8")))
    assert named <= dev.MODES.keys()


def test_readme_sets_up_with_two_commands():
    """One runs the main job and shows it, one passes the tests. .ci/run runs the second."""
    text = README.read_text("utf-8")
    assert {"demo", "test"} <= set(DEV.findall(text))
    assert TEST_COMMAND in text
    first = next(fenced_blocks(text.split(TEST_COMMAND, 1)[1]))
    assert first.text.strip() == "python3 dev.py test"


def test_supported_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = {c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c}
    assert listed == set(dev.SUPPORTED)
    assert f"jax>={dev.OLDEST[1]},<" in " ".join(project["dependencies"])
    assert dev.OLDEST[0] == dev.SUPPORTED[-1]
    assert project["requires-python"] == f">={dev.SUPPORTED[-1]},<3.{int(dev.SUPPORTED[0].split('.')[1]) + 1}"


MARKDOWN = """
text
```python
x = 1
```
```
not python
```
<!-- not executed: needs a TPU -->

```python
raise AssertionError
```
````python
y = x + 1
````
"""


def test_blocks_are_found():
    assert [(b.text, b.line) for b in python_blocks(MARKDOWN)] == [("x = 1", 4), ("y = x + 1", 15)]


def test_an_exception_needs_a_reason():
    with pytest.raises(AssertionError, match="without a reason"):
        list(python_blocks("<!-- not executed: -->\n```python\n1/0\n```\n"))

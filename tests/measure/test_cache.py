"""Compiled memory on disk: found again by the same program, by no other, and never in the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoremat as ar
from autoremat.measure._cache import cache_folder

S = jax.ShapeDtypeStruct
X = S((256, 64), jnp.float32)


def f(x: Any) -> Any:
    return jnp.sin(x @ x.T).sum()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOREMAT_CACHE", str(tmp_path))
    return tmp_path


def test_found_again(folder: Path) -> None:
    first, second = ar.measure(f, X), ar.measure(f, X)
    assert (first.cached, second.cached) == (False, True)
    assert first.peak_bytes == second.peak_bytes
    assert first.seconds == second.seconds


def test_another_program_shape_or_option_is_not_found(folder: Path) -> None:
    ar.measure(f, X)
    assert not ar.measure(lambda x: f(x) + 1, X).cached
    assert not ar.measure(f, S((128, 64), jnp.float32)).cached
    assert not ar.measure(f, X, compiler_options={}).cached


@pytest.mark.parametrize("content", ["", "{", "[]", '{"peak_bytes": 3}', '{"surprise": 1}'])
def test_a_damaged_file_is_as_good_as_none(folder: Path, content: str) -> None:
    expected = ar.measure(f, X)
    (path,) = folder.rglob("*.json")
    path.write_text(content)
    again = ar.measure(f, X)
    assert not again.cached
    assert again.peak_bytes == expected.peak_bytes
    assert ar.measure(f, X).cached


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("AUTOREMAT_CACHE", str(blocked))
    assert not ar.measure(f, X).cached
    assert not ar.measure(f, X).cached


def test_off_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOREMAT_CACHE", "off")
    assert cache_folder() is None
    monkeypatch.delenv("AUTOREMAT_CACHE")
    found = cache_folder()
    assert found is not None
    assert found.parts[-2:] == ("autoremat", "compiled")


PLAN = """
import jax, jax.numpy as jnp, autoremat as ar
def loss(w, x):
    for _ in range(4):
        x = jnp.sin(jnp.sin(x @ w))
    return x.sum()
S = jax.ShapeDtypeStruct
plan = ar.plan(loss, S((32, 32), jnp.float32), S((4096, 32), jnp.float32), budget="75%")
print(plan.compiles, plan.peak_bytes, plan.memory.cached)
"""


def test_a_second_process_compiles_nothing(folder: Path) -> None:
    """The same plan, by the memory that the first one asked the compiler for."""
    lines = [
        subprocess.run(
            [sys.executable, "-c", PLAN], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert int(lines[0][0]) > 0
    assert int(lines[1][0]) == 0
    assert lines[0][1:] == lines[1][1:]

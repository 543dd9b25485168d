"""Plan files: what is read is what was saved, and anything else is refused with its reason."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoremat as ar
from autoremat.measure import environment
from autoremat.plan import _files
from autoremat.plan._rewrite import Block, LoopBlock, NestedBlock
from autoremat.transform._planned import PlannedPolicy


def _policy(**changes: Any) -> PlannedPolicy:
    fields: dict[str, Any] = dict(
        fingerprint="0123456789abcdef",
        keep=((-1, 0, "device"), (4, 1, "packed")),
        price=Fraction(-22, 7),
        target="cpu",
        fence="dependence",
    )
    return PlannedPolicy(**fields | changes)


def _plan(**changes: Any) -> ar.Plan:
    memory = ar.MemoryUse(
        argument_bytes=10,
        output_bytes=4,
        temp_bytes=100,
        alias_bytes=0,
        peak_bytes=114,
        seconds=0.1,
        flops=1e10,
    )
    inner = LoopBlock(0, (Block(1, 2, _policy(keep=())),))
    fields: dict[str, Any] = dict(
        function="löss",
        fingerprint="fedcba9876543210",
        argnums=(0, 2),
        has_aux=True,
        target="cpu",
        compiler_options={"xla_a": "b", "xla_flag": True, "xla_number": 3, "xla_share": 0.5},
        budget_bytes=2**40,
        peak_bytes=114,
        unplanned_bytes=200,
        predicted_bytes=90,
        memory=memory,
        kept_bytes=50,
        recompute_flops=7,
        forward_flops=70,
        recompute_seconds=7e-9,
        bound_seconds=5e-9,
        step_seconds=2e-7,
        seconds=1 / 3,
        compile_seconds=0,  # the sum of no compilations is an integer
        compiles=0,
        grouping="one stage a unit",
        decisions=(
            Block(0, 4, _policy()),
            LoopBlock(5, (inner, Block(2, 3, _policy(price=Fraction(0))))),
            NestedBlock(6, 9, "dependence", (Block(6, 7, _policy()), NestedBlock(7, 9, "barrier", ()))),
        ),
        notes=("A note.",),
        arguments=("float32[3]",),
        operations=("sin",),
        environment=environment(),
    )
    return ar.Plan(**fields | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decisions": (), "notes": (), "arguments": (), "operations": (), "compiler_options": {}},
        {"memory": dataclasses.replace(_plan().memory, flops=None)},
    ],
)
def test_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = _plan(**changes)
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = ar.Plan.load(str(path))
    assert loaded == plan
    assert repr(loaded) == repr(plan)
    loaded.save(path)
    assert ar.Plan.load(path) == plan
    assert os.listdir(tmp_path) == ["plan.json"]


def test_the_file_says_what_it_was_made_with(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _plan().save(path)
    document = json.loads(path.read_text())
    assert document["version"] == 4
    assert document["autoremat"] == ar.__version__
    assert document["plan"]["environment"] == environment()
    assert document["plan"]["decisions"][0]["policy"]["price"] == "-22/7"


def test_a_real_plan_works_after_loading(tmp_path: Path) -> None:
    def loss(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.sin(jnp.sin(x @ w))
        return jnp.sum(x)

    w, x = jnp.full((16, 16), 0.1), jnp.ones((128, 16))
    plan = ar.plan(loss, w, x, budget="99%", effort="fast")
    assert plan.decisions
    plan.save(tmp_path / "plan.json")
    loaded = ar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    np.testing.assert_allclose(jax.grad(loaded.apply(loss))(w, x), jax.grad(loss)(w, x), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------- other versions


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("jax", "0.9.1", f"jax 0.9.1; here is jax {re.escape(jax.__version__)}"),
        ("jaxlib", "0.9.1", "jaxlib 0.9.1; here is jaxlib"),
        ("xla_flags", "--xla_foo=1", "xla_flags --xla_foo=1; here is xla_flags none"),
    ],
)
def test_another_compiler_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, text: str
) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    path = tmp_path / "plan.json"
    made = _plan(environment={**environment(), key: value})
    made.save(path)
    loaded = ar.Plan.load(path)
    assert loaded.notes[0] == "A note."
    (note,) = loaded.notes[1:]
    assert re.search(text, note), note
    assert "autoremat.measure" in note
    assert dataclasses.replace(loaded, notes=("A note.",)) == made
    # Saved again, it is still a plan that was verified there.
    loaded.save(path)
    assert ar.Plan.load(path) == loaded


def test_another_version_of_autoremat_alone_is_no_matter(tmp_path: Path) -> None:
    made = _plan(environment={**environment(), "autoremat": "0.0.1"})
    made.save(tmp_path / "plan.json")
    assert ar.Plan.load(tmp_path / "plan.json") == made


# ----------------------------------------------------------------------------------------------------------- damaged files


def _saved(path: Path) -> dict[str, Any]:
    _plan().save(path)
    return json.loads(path.read_text())


def _refused(path: Path, *texts: str) -> None:
    with pytest.raises(ar.PlanFileError) as caught:
        ar.Plan.load(path)
    message = str(caught.value)
    for text in (str(path), "Cheapest fix: ", *texts):
        assert text in message, message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "it is empty"),
        (b"hello\nworld", "not a plan file: no JSON at line 1, column 1"),
        (b'{"format": "autoremat plan",}', "damaged: no JSON at line 1, column"),
        (b"\x80\x81", "no UTF-8 text"),
        (b"[1, 2]", 'no "format": "autoremat plan"'),
        (b'"autoremat plan"', 'no "format": "autoremat plan"'),
        (b'{"weights": 1}', 'no "format": "autoremat plan"'),
        (b"[" * 100_000 + b"]" * 100_000, "not a plan file"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "not a plan file"),
    ],
)
def test_not_a_plan_file(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    _refused(path, text)


def test_truncated(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _plan().save(path)
    whole = path.read_text()
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        path.write_text(whole[: int(len(whole) * share)].rstrip().rstrip("}"))
        _refused(path, "truncated", "ends in the middle")


@pytest.mark.parametrize("version", [0, 3, 5, "4", None])
def test_another_format_version(tmp_path: Path, version: Any) -> None:
    path = tmp_path / "plan.json"
    document = _saved(path) | {"version": version, "autoremat": "9.9.9"}
    path.write_text(json.dumps(document))
    _refused(path, f"version {version!r} of the format", "by autoremat 9.9.9", "reads version 4")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        ar.Plan.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("key", ["autoremat", "plan", "checksum"])
def test_a_missing_entry(tmp_path: Path, key: str) -> None:
    path = tmp_path / "plan.json"
    document = _saved(path)
    del document[key]
    path.write_text(json.dumps(document))
    _refused(path, f"damaged: ['{key}'] missing")


def _set(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        *outer, last = path
        for key in outer:
            document = document[key]
        document[last] = value

    return change


def _delete(*path: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        *outer, last = path
        for key in outer:
            document = document[key]
        del document[last]

    return change


_POLICY = ("decisions", 0, "policy")

_CHANGES = [
    *((_delete(f.name), f"`plan` lacks ['{f.name}']") for f in dataclasses.fields(ar.Plan)),
    (_delete("memory", "temp_bytes"), "`plan.memory` lacks ['temp_bytes']"),
    (_delete(*_POLICY, "keep"), "`plan.decisions[0].policy` lacks ['keep']"),
    (_set("colour", value="red"), "`plan` has unknown fields ['colour']"),
    (_set("function", value=3), "`plan.function` must be a string, got 3"),
    (_set("peak_bytes", value="114"), '`plan.peak_bytes` must be an integer, got "114"'),
    (_set("peak_bytes", value=True), "`plan.peak_bytes` must be an integer, got true"),
    (_set("peak_bytes", value=1.5), "`plan.peak_bytes` must be an integer, got 1.5"),
    (_set("has_aux", value=0), "`plan.has_aux` must be true or false, got 0"),
    (_set("seconds", value="fast"), '`plan.seconds` must be a number, got "fast"'),
    (_set("seconds", value=None), "`plan.seconds` must be a number, got null"),
    (_set("argnums", value=0), "`plan.argnums` must be a list, got 0"),
    (_set("argnums", value=["x"]), '`plan.argnums[0]` must be an integer, got "x"'),
    (_set("compiler_options", value=[]), "`plan.compiler_options` must be an object, got []"),
    (_set("memory", value=None), "`plan.memory` must be an object, got null"),
    (_set("memory", "flops", value="many"), '`plan.memory.flops` must be a number, got "many"'),
    (_set("decisions", value="x" * 100), '`plan.decisions` must be a list, got "xxx'),
    (
        _set("decisions", 0, value=7),
        "`plan.decisions[0]` must be an object whose \"kind\" is one of ['Block', 'LoopBlock', 'NestedBlock']",
    ),
    (_set("decisions", 0, "kind", value="Stage"), '`plan.decisions[0]` must be an object whose "kind"'),
    (
        _set("decisions", 1, "body", 1, "stop", value=None),
        "`plan.decisions[1].body[1].stop` must be an integer",
    ),
    (_set(*_POLICY, "keep", 0, value=[1, 2]), "`plan.decisions[0].policy.keep[0]` must be a list of 3"),
    (_set(*_POLICY, "keep", 0, 2, value=2), "`plan.decisions[0].policy.keep[0][2]` must be a string"),
    *(
        (
            _set(*_POLICY, "price", value=p),
            '`plan.decisions[0].policy.price` must be a fraction such as "3/4"',
        )
        for p in (0.5, 1, "1/0", "1.5", "a/b", "1/2/3", None)
    ),
    (_set("notes", value=[None]), "`plan.notes[0]` must be a string, got null"),
]


@pytest.mark.parametrize(("change", "text"), _CHANGES, ids=[text for _, text in _CHANGES])
@pytest.mark.parametrize("signed", [False, True], ids=["by hand", "with a right checksum"])
def test_wrong_fields(tmp_path: Path, change: Callable[[Any], None], text: str, signed: bool) -> None:
    path = tmp_path / "plan.json"
    document = _saved(path)
    change(document["plan"])
    if signed:
        document["checksum"] = _files._checksum(document)
    path.write_text(json.dumps(document))
    _refused(path, "damaged: ", text)


@pytest.mark.parametrize(
    "change",
    [
        _set("plan", "budget_bytes", value=5),
        _set("plan", "decisions", value=[]),
        _set("plan", *_POLICY, "keep", 0, 0, value=3),
        _set("jax", value="0.9"),
    ],
)
def test_edited_by_hand(tmp_path: Path, change: Callable[[Any], None]) -> None:
    path = tmp_path / "plan.json"
    document = _saved(path)
    change(document)
    path.write_text(json.dumps(document))
    _refused(path, "the checksum does not match", "edited")


def test_another_layout_of_the_same_content_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    document = _saved(path)
    path.write_text(json.dumps(document, sort_keys=True, indent=None))
    assert ar.Plan.load(path) == _plan()


def test_what_json_cannot_hold_is_refused_when_saving(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ar.PlanFileError, match="of type object cannot be saved"):
        _plan(compiler_options={"a": object()}).save(path)
    assert not os.listdir(tmp_path)

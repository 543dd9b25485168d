"""`FILE.py:NAME`: what can be wrong with it, each with a message that says how to put it right."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoremat.cli import _errors as codes
from support.cli import Call

HEAD = "import jax.numpy as jnp\n"
LOSS = HEAD + "def loss(x):\n    return (x ** 2).sum()\n"
NEED = "NAME is a function without arguments that returns the function to differentiate and its example arguments"

# A file, and what the message says of it.
FAULTS: dict[str, tuple[str, list[str]]] = {
    "syntax": ("def example(:\n    pass\n", ["model.py is not valid Python:", "line 1"]),
    "import": ("import no_such_module_at_all\n", ["does not import: No module named 'no_such_module_at_all'", "line 1 of model.py", "install"]),
    "raises": ("\nx = 1 / 0\n", ["does not import: ZeroDivisionError: division by zero, line 2 of model.py."]),
    "exits": ("raise SystemExit(3)\n", ["does not import: SystemExit: 3, line 1"]),
    "missing": (LOSS, ["has no `example`; it defines loss.", NEED]),
    "empty": ("", ["has no `example`; it defines no function"]),
    "number": ("example = 3\n", ["got 3 of type int, which cannot be called", NEED]),
    "arguments": (HEAD + "def example(x, y, z=1):\n    return x\n", ["takes arguments (x, y).", "return example, (x, y,)"]),
    "call": ("def example():\n    return [][1]\n", ["example() failed: IndexError: list index out of range, line 2 of model.py"]),
    "none": ("def example():\n    pass\n", ["example() returned None of type NoneType.", NEED]),
    "function only": (LOSS + "def example():\n    return loss\n", ["returned <function loss at", NEED]),
    "many": (LOSS + "def example():\n    return loss, 1.0, 2.0\n", ["returned 3 values.", "put the arguments into one tuple"]),
    "no tuple": (LOSS + "def example():\n    return loss, jnp.ones(3)\n", ["the arguments are Array([1., 1., 1.]", "need a tuple", "(x,)"]),
    "no function": (HEAD + "def example():\n    return 3, (1.0,)\n", ["returned (3, (1.0,)) of type tuple"]),
    "dict lacks": (LOSS + "def example():\n    return {'fun': loss}\n", ["returned a dict that lacks ['args']"]),
    "dict unknown": (LOSS + "def example():\n    return {'fun': loss, 'args': (1.0,), 'aux': 1}\n", ["has unknown keys ['aux']"]),
    "dict function": (LOSS + "def example():\n    return {'fun': 'loss', 'args': (1.0,)}\n", ["the function to differentiate is 'loss' of type str"]),
    "argnums": (LOSS + "def example():\n    return {'fun': loss, 'args': (1.0,), 'argnums': 'x'}\n", ["argnums is 'x', need an int"]),
    "has_aux": (LOSS + "def example():\n    return {'fun': loss, 'args': (1.0,), 'has_aux': 1}\n", ["has_aux is 1, need True or False"]),
    "count": (LOSS + "def example():\n    return loss, (1.0, 2.0)\n", ["calling loss with the example arguments failed: TypeError"]),
    "shapes": (
        HEAD + "def loss(x):\n    return x @ jnp.ones(5)\ndef example():\n    return loss, (jnp.ones(3),)\n",
        ["calling loss with the example arguments failed: TypeError", "line 3 of model.py"],
    ),
    "integers": (LOSS + "def example():\n    return loss, (jnp.arange(3),)\n", ["hold no floating-point array"]),
    "no scalar": (
        HEAD + "def loss(x):\n    return x * 2\ndef example():\n    return loss, (jnp.ones(3),)\n",
        ["needs a function that returns one floating-point scalar"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_4(fault: str, tmp_path: Path, call: Call):
    source, texts = FAULTS[fault]
    path = tmp_path / "model.py"
    path.write_text(source, "utf-8")
    result = call("plan", f"{path}:example", "--budget", "50%")
    assert result.code == codes.BAD_INPUT
    for text in texts:
        assert text in result.words
    assert result.err.startswith("autoremat: error: ")
    assert result.out == ""
    assert "Traceback" not in result.err


def test_the_fix_for_arguments_works(tmp_path: Path, call: Call):
    """The message proposes a function to add: added, it is found."""
    path = tmp_path / "model.py"
    path.write_text(LOSS, "utf-8")
    error = call("residuals", f"{path}:loss").err
    proposed = error.split("add to model.py\n", 1)[1].replace("\n    ", "\n").removeprefix("    ")
    path.write_text(f"{LOSS}\nx = jnp.ones(3)\n{proposed}", "utf-8")
    assert call("residuals", f"{path}:example").code == 0


def test_an_error_of_a_checkpoint_inside_stays_itself(tmp_path: Path, call: Call):
    path = tmp_path / "model.py"
    path.write_text(
        "import autoremat, jax, jax.numpy as jnp\n"
        "def loss(x):\n    return jax.grad(autoremat.checkpoint(lambda x: jnp.sin(x), policy=lambda *a, **k: 3))(x)\n"
        "def example():\n    return loss, (1.0,)\n",
        "utf-8",
    )
    result = call("residuals", f"{path}:example", "--json")
    assert result.code == codes.BAD_INPUT
    assert result.data["kind"] == "PolicyError"


def test_a_file_that_is_not_there(tmp_path: Path, call: Call):
    result = call("residuals", f"{tmp_path}/nothing.py:example")
    assert result.code == codes.BAD_INPUT
    assert "nothing.py does not exist; need a Python file. Cheapest fix: check the path" in result.words


def test_a_folder(tmp_path: Path, call: Call):
    assert "is a folder; need a Python file" in call("residuals", f"{tmp_path}:example").words


def test_another_kind_of_file(tmp_path: Path, call: Call):
    (tmp_path / "model.txt").write_text(LOSS, "utf-8")
    result = call("residuals", f"{tmp_path}/model.txt:example")
    assert result.code == codes.BAD_INPUT
    assert "its name must end with .py" in result.words


def test_a_bad_file_as_json(tmp_path: Path, call: Call):
    result = call("frontier", f"{tmp_path}/nothing.py:example", "--json")
    assert result.code == codes.BAD_INPUT
    assert result.data["kind"] == "InputError"
    assert result.data["exit_code"] == 4
    assert "does not exist" in result.data["error"]


def test_modules_beside_the_file_can_be_imported(tmp_path: Path, call: Call):
    (tmp_path / "autoremat_test_neighbour.py").write_text(LOSS, "utf-8")
    path = tmp_path / "model.py"
    path.write_text(
        "import jax.numpy as jnp\nfrom autoremat_test_neighbour import loss\n"
        "def example():\n    return loss, (jnp.ones(3),)\n",
        "utf-8",
    )
    assert call("residuals", f"{path}:example").code == 0


def test_shapes_are_enough(tmp_path: Path, call: Call):
    path = tmp_path / "model.py"
    path.write_text(
        LOSS + "import jax\ndef example():\n    return loss, (jax.ShapeDtypeStruct((10**6,), 'float32'),)\n",
        "utf-8",
    )
    assert call("residuals", f"{path}:example").code == 0

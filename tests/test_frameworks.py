"""docs/frameworks.md: the blocks of a section run in order, after those before the first heading of that level.

What the page says in prose of a framework is asserted in `CLAIMS`, in the namespace that its section leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import autoremat as ar
from test_readme import Block, python_blocks

PAGE = Path(__file__).resolve().parent.parent / "docs" / "frameworks.md"
TEXT = PAGE.read_text("utf-8")
HEADINGS = {line[3:]: n for n, line in enumerate(TEXT.splitlines(), 1) if line.startswith("## ")}
STARTS = [0, *HEADINGS.values(), len(TEXT)]
FIRST, *SECTIONS = ([b for b in python_blocks(TEXT) if a < b.line < z] for a, z in pairwise(STARTS))


def linen(of: SimpleNamespace) -> None:
    """`nn.remat` takes no flag by keyword."""
    theirs = of.nn.remat(of.Block)(name="b")
    with pytest.raises(jax.errors.TracerBoolConversionError):
        theirs.init(jax.random.key(0), of.x, train=False)


def nnx(of: SimpleNamespace) -> None:
    """A dropout's counter cannot advance under `jax.grad` without a copy; `nnx.jit` takes no compiler options."""
    from flax.errors import TraceContextError

    graphdef, params, rest = of.nnx.split(of.Net(of.nnx.Rngs(0)), of.nnx.Param, ...)
    with pytest.raises(TraceContextError):
        jax.grad(lambda params: of.nnx.merge(graphdef, params, rest)(of.x).sum())(params)
    with pytest.raises(TypeError, match="compiler_options"):
        of.nnx.jit(of.loss, compiler_options={})


def haiku(of: SimpleNamespace) -> None:
    """A transformation of JAX round a module lets its state escape."""
    wrapped = of.net_of(lambda make: ar.checkpoint(make()))
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(wrapped.apply)(of.params, of.state, None, of.x)


def keras(of: SimpleNamespace) -> None:
    """What `RematScope` does with layers that look at `training`, and `keras.remat` with what they assign."""
    if not of.keras.__version__.startswith("3.15."):
        pytest.skip("the page speaks of Keras 3.15")
    with of.keras.RematScope("full"):
        scoped = of.keras.layers.Dropout(0.1)
    of.keras.config.disable_traceback_filtering()  # the filter fails on the exception itself
    try:
        with pytest.raises(jax.errors.TracerBoolConversionError):
            scoped(of.x, training=True)
    finally:
        of.keras.config.enable_traceback_filtering()
    norm = of.keras.layers.BatchNormalization()
    norm.build(of.x.shape)
    before = norm.moving_mean.value
    of.keras.remat(lambda x: norm(x, training=True))(of.x)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jnp.add(norm.moving_mean.value, before)


CLAIMS: dict[str, Callable[[SimpleNamespace], None]] = {
    "Flax Linen": linen,
    "Flax NNX": nnx,
    "Haiku": haiku,
    "Keras": keras,
}


def execute(blocks: list[Block], namespace: dict[str, object]) -> None:
    for block in blocks:
        padded = "\n" * (block.line - 1) + block.text  # a traceback shows the line of the document
        exec(compile(padded, str(PAGE), "exec"), namespace)


@pytest.mark.parametrize(
    ("heading", "blocks"), list(zip(HEADINGS, SECTIONS, strict=True)), ids=list(HEADINGS)
)
def test_section(heading: str, blocks: list[Block]):
    if heading == "Keras":
        keras = pytest.importorskip("keras")
        if keras.backend.backend() != "jax":
            pytest.skip("Keras runs on another backend")
    assert blocks
    namespace: dict[str, object] = {"__name__": "__main__"}
    execute([*FIRST, *blocks], namespace)
    if heading in CLAIMS:
        CLAIMS[heading](SimpleNamespace(**namespace))


def test_every_framework_has_a_section():
    assert list(HEADINGS) == ["Flax Linen", "Flax NNX", "Equinox", "Haiku", "Keras", "Optax"]


@pytest.mark.parametrize("checkpoint", [ar.checkpoint, jax.checkpoint])
def test_a_wrapper_made_once_is_traced_once(checkpoint: Callable[..., Callable[..., jax.Array]]):
    class Layer:
        def __init__(self) -> None:
            self.w = jnp.float32(1.0)
            self.run = checkpoint(self.body)

        def body(self, x: jax.Array) -> jax.Array:
            return jnp.sin(self.w * x)

    layer, x = Layer(), jnp.float32(1.0)
    first = layer.run(x)
    layer.w = jnp.float32(2.0)
    assert layer.run(x) == first != layer.body(x)
    assert checkpoint(lambda x: layer.body(x))(x) == layer.body(x)

"""Equal layers stand for each other in predictions, and only there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoremat.plan._alike import Alike
from autoremat.plan._plan import prepare
from autoremat.plan._program import planned_function
from autoremat.predict import predict

LAYERS, WIDTH = 4, 16
X = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
WS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS


def layer(x: Any, w: Any) -> Any:
    return jnp.sin(jnp.exp(x @ w) @ w.T) + x


def unrolled(ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = layer(x, w)
    return (x**2).sum()


def two_kinds(ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        x = layer(x, w) if i % 2 else jnp.cos(layer(jnp.tanh(x), w))
    return (x**2).sum()


def with_loop(ws: Any, x: Any) -> Any:
    x, _ = lax.scan(lambda c, _: (layer(c, ws[0]), None), x, None, length=5)
    return unrolled(ws[1:], x)


def _with_rule(*, keeps: int) -> Any:
    """A sine whose derivative keeps so many arrays."""

    @jax.custom_vjp
    def sine(x: Any) -> Any:
        return jnp.sin(x)

    sine.defvjp(
        lambda x: (jnp.sin(x), tuple(jnp.cos(x + i) for i in range(keeps))),
        lambda kept, ct: (sum(kept) * ct,),
    )
    return sine


LIGHT, HEAVY = _with_rule(keeps=1), _with_rule(keeps=8)


def other_rules(ws: Any, x: Any) -> Any:
    """Layers that are equal forward; that of the first keeps less."""
    for i, w in enumerate(ws):
        x = (HEAVY if i else LIGHT)(x @ w) + x
    return (x**2).sum()


@pytest.mark.parametrize("fun", [unrolled, two_kinds, with_loop, other_rules])
def test_predictions_are_the_same(fun: Any) -> None:
    candidates = prepare(fun, (WS, X), 0, False, None, None, None)
    alike, compared = Alike(), 0
    for number, variant in enumerate(candidates.variants()):
        states = variant.path.states
        for state in (*states[:: max(1, len(states) // 5)], states[-1]):
            decisions = candidates.decisions(number, state.index)
            once = predict(candidates.program.whole(decisions, alike), WS, X)
            assert once.peak_bytes == predict(candidates.program.whole(decisions), WS, X).peak_bytes
            compared += 1
    assert compared > 5


def parts(fun: Any, alike: Alike | None) -> list[Any]:
    """The programs of the checkpoints of a plan that recomputes everything."""
    candidates = prepare(fun, (WS, X), 0, False, None, None, None)
    variant = next(v for v in candidates.variants() if v.name == "one stage a layer")
    decisions = candidates.decisions(candidates.record.variants.index(variant), variant.path.flat - 1)
    planned = planned_function(candidates.traced, decisions, alike)
    eqns = jax.make_jaxpr(planned)(WS, X).jaxpr.eqns
    return [e.params["jaxpr"] for e in eqns if e.primitive.name == "autoremat_checkpoint"]


def test_equal_layers_are_one_where_only_memory_matters() -> None:
    assert len(set(map(id, parts(unrolled, Alike())))) < len(parts(unrolled, Alike()))
    assert len(set(map(id, parts(unrolled, None)))) == len(parts(unrolled, None))


def test_what_is_compiled_keeps_the_names_of_each_layer() -> None:
    stacks = [str(p.eqns[0].source_info.name_stack) for p in parts(unrolled, None)]
    assert [s for s in stacks if "layer_" in s] == [f"layer_{i}" for i in range(LAYERS)]

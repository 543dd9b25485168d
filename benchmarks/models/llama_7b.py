"""A Llama-like model of 6.7 billion parameters and its training step, of shapes alone: no array is made.

32 layers under `scan`, width 4096, 32 heads, a gated MLP of 11008, 32000 tokens; attention unfused. Parameters and Adam's moments are float32,
layers run in bfloat16, the loss is the cross-entropy of the next token. Divided as is usual: parameters and moments over all devices (FSDP over "data",
tensor parallel over "model"), the batch over "data"; the residual stream is constrained to that, or the compiler divides it as the embeddings are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.llama import Shape, block, init, rms_norm

SHAPE = Shape(layers=32, width=4096, mlp=11008, heads=32, vocabulary=32000, sequence=4096)
ADAM = optax.adam(1e-4)

COLUMNS, ROWS = P(None, "data", "model"), P(None, "model", "data")
SPECS = {
    "embed": P("model", "data"),
    "layers": {
        **dict.fromkeys(("q", "k", "v", "gate", "up"), COLUMNS),
        **dict.fromkeys(("o", "down"), ROWS),
        **dict.fromkeys(("norm1", "norm2"), P()),
    },
    "norm": P(),
}


def loss(params: dict[str, Any], tokens: Any, heads: int, stream: NamedSharding) -> Any:
    """The mean cross-entropy of the next token."""

    def layer(x: Any, p: dict[str, Any]) -> tuple[Any, None]:
        y = block(x, jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), heads).astype(jnp.bfloat16)
        return jax.lax.with_sharding_constraint(y, stream), None

    embed = params["embed"].astype(jnp.bfloat16)
    embedded = jax.lax.with_sharding_constraint(embed[tokens[:, :-1]], stream)
    x, _ = jax.lax.scan(layer, embedded, params["layers"])
    logits = (rms_norm(x, params["norm"].astype(jnp.bfloat16)) @ embed.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_step(mesh: Mesh, heads: int = SHAPE.heads) -> Any:
    """A step of Adam, parameters and moments donated."""
    stream = NamedSharding(mesh, P("data"))

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda p: loss(p, tokens, heads, stream))(params)
        updates, state = ADAM.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def example(mesh: Mesh, sequences: int, shape: Shape = SHAPE) -> tuple[Any, Any, Any]:
    """Shapes of parameters, moments and tokens, divided over a mesh with the axes "data" and "model"."""

    def put(x: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(put, jax.eval_shape(lambda: init(jax.random.key(0), shape)), SPECS)
    adam, *rest = jax.eval_shape(ADAM.init, params)
    moments = adam._replace(
        count=put(adam.count, P()), mu=jax.tree.map(put, adam.mu, SPECS), nu=jax.tree.map(put, adam.nu, SPECS)
    )
    tokens = put(jax.ShapeDtypeStruct((sequences, shape.sequence + 1), jnp.int32), P("data"))
    return params, (moments, *rest), tokens

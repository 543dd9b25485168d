"""A small transformer encoder to plan for, with no line in it about memory.

    autoremat residuals examples/transformer.py:example
    autoremat frontier examples/transformer.py:example
    autoremat plan examples/transformer.py:example --budget 50% --out plan.json
    python examples/transformer.py

The last one does in a program what the third does from the command line, and shows that the loss and the gradients are
those of the function without a plan.
"""

import jax
import jax.numpy as jnp

import autoremat

LAYERS, BATCH, SEQUENCE, WIDTH, HEADS = 3, 8, 128, 64, 4


def init(key):
    def normal(k, *shape):
        return jax.random.normal(k, shape) * shape[0] ** -0.5

    def layer(k):
        keys = jax.random.split(k, 4)
        return {
            "qkv": normal(keys[0], WIDTH, 3 * WIDTH),
            "out": normal(keys[1], WIDTH, WIDTH),
            "up": normal(keys[2], WIDTH, 4 * WIDTH),
            "down": normal(keys[3], 4 * WIDTH, WIDTH),
        }

    return [layer(k) for k in jax.random.split(key, LAYERS)]


def normalize(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def attention(x, p):
    qkv = (x @ p["qkv"]).reshape(BATCH, SEQUENCE, 3, HEADS, WIDTH // HEADS)
    query, key, value = jnp.moveaxis(qkv, (2, 3), (0, 2))
    weights = jax.nn.softmax(query @ key.mT * (WIDTH // HEADS) ** -0.5)
    return jnp.moveaxis(weights @ value, 1, 2).reshape(x.shape) @ p["out"]


def loss(params, batch):
    """Mean squared error of the last layer against the next position."""
    x = batch
    for p in params:
        x = x + attention(normalize(x), p)
        x = x + jax.nn.gelu(normalize(x) @ p["up"]) @ p["down"]
    return ((x[:, :-1] - batch[:, 1:]) ** 2).mean()


def example():
    """The function to differentiate, and example arguments: what `autoremat plan FILE.py:NAME` calls."""
    keys = jax.random.split(jax.random.key(0))
    return loss, (init(keys[0]), jax.random.normal(keys[1], (BATCH, SEQUENCE, WIDTH)))


def main(effort="balanced"):
    fun, (params, batch) = example()
    plan = autoremat.plan(fun, params, batch, budget="50%", effort=effort)
    print(plan.report)

    def gradient(f):
        return jax.jit(jax.value_and_grad(f), compiler_options=dict(plan.compiler_options))

    value, grads = gradient(fun)(params, batch)
    planned_value, planned_grads = gradient(plan.apply(fun))(params, batch)
    print("same loss:", bool(jnp.allclose(value, planned_value)))
    close = jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-4, atol=1e-6), grads, planned_grads)
    print("same gradients:", jax.tree.all(close))


if __name__ == "__main__":
    main()

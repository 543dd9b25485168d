"""Three blocks of `sin(sin(x @ w))`: what differentiation keeps, without and with `autoremat.checkpoint`.

    python examples/seed.py

Prints `True`, as the gradients are equal, and what is kept for the backward pass: with the policy
`dots_with_no_batch_dims_saveable` the inputs of each block and the output of its matrix product, and no cosine.
"""

import jax
import jax.numpy as jnp

import autoremat


def block(x, w):
    return jnp.sin(jnp.sin(x @ w))


def net(x, w):
    for _ in range(3):
        x = block(x, w)
    return x.sum()


checkpointed_block = autoremat.checkpoint(
    block, policy=autoremat.checkpoint_policies.dots_with_no_batch_dims_saveable
)


def checkpointed_net(x, w):
    for _ in range(3):
        x = checkpointed_block(x, w)
    return x.sum()


def main():
    x, w = jnp.ones((4, 4)), jnp.eye(4) * 0.5
    print(jnp.allclose(jax.grad(net, 1)(x, w), jax.grad(checkpointed_net, 1)(x, w)))
    print("Without checkpoint:")
    autoremat.print_saved_residuals(net, x, w)
    print("With checkpoint:")
    autoremat.print_saved_residuals(checkpointed_net, x, w)


if __name__ == "__main__":
    main()

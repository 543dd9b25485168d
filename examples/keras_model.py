"""A Keras model, planned without touching it.

    python examples/keras_model.py [--model ResNet50] [--pixels 224] [--batch 32] [--budget 50%]

Any model of `keras.applications` on the JAX backend. The loss is `stateless_call(training=True)` and a cross entropy; what
`stateless_call` returns besides (the moving statistics of batch normalization) is its auxiliary output.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import jax.numpy as jnp
import keras
import optax

import autoremat


def loss_of(model):
    def loss(trainable, non_trainable, images, labels):
        logits, non_trainable = model.stateless_call(trainable, non_trainable, images, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), non_trainable

    return loss


def application(name, pixels):
    return getattr(keras.applications, name)(
        weights=None, input_shape=(pixels, pixels, 3), classes=10, classifier_activation=None
    )


def run(model, batch, budget, effort="balanced"):
    """Plan for the budget and take a step; returns the plan."""
    trainable = [v.value for v in model.trainable_variables]
    non_trainable = [v.value for v in model.non_trainable_variables]
    images = jax.random.normal(jax.random.key(0), (batch, *model.input_shape[1:]))
    labels = jnp.arange(batch) % 10
    loss = loss_of(model)

    plan = autoremat.plan(
        loss, trainable, non_trainable, images, labels, budget=budget, has_aux=True, effort=effort
    )
    print(plan.report)

    step = jax.jit(
        jax.value_and_grad(plan.apply(loss), has_aux=True), compiler_options=dict(plan.compiler_options)
    )
    (value, non_trainable), gradients = step(trainable, non_trainable, images, labels)
    print(f"loss {value:.4f}, norm of the gradient {optax.tree.norm(gradients):.4f}")
    return plan


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ResNet50")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--budget", default="50%")
    options = parser.parse_args()
    run(application(options.model, options.pixels), options.batch, options.budget)

"""Models of `keras.applications` on the JAX backend, run layer by layer, so that blocks of layers can be wrapped.

Without their heads for 1,000 classes, whose parameters would fill the memory of small images. Training mode, `weights=None`.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"  # before the first import of Keras

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.keras_models import example
from benchmarks.models.model import Loss, Model, Wrap

CLASSES = 10


@dataclass(frozen=True)
class Case:
    """An application, the side of its images in pixels, the batch, and what the names of a block's layers begin with."""

    application: str
    pixels: int
    batch: int
    prefix: str
    block: str


CASES = {
    "vgg19": Case("VGG19", 64, 32, r"block\d+", "the convolutions of one resolution, with the pooling"),
    "resnet50": Case("ResNet50", 64, 64, r"conv\d+_block\d+", "a residual block"),
    "mobilenet": Case("MobileNet", 64, 32, r"conv_(?:pad|dw|pw)_(\d+)", "a separable convolution"),
    "densenet121": Case("DenseNet121", 64, 32, r"conv\d+_block\d+", "a dense layer"),
}


def network(case: Case) -> Any:
    """The Keras model: the application's convolutions, their mean over the image, and a small head."""
    import keras

    keras.utils.set_random_seed(0)
    base = getattr(keras.applications, case.application)(
        weights=None, include_top=False, pooling="avg", input_shape=(case.pixels, case.pixels, 3)
    )
    return keras.Model(base.input, keras.layers.Dense(CLASSES)(base.output))


@dataclass(frozen=True, eq=False)
class Segment:
    """Layers that run one after the other, from one tensor to one tensor."""

    layers: tuple[Any, ...]
    wrapped: bool

    def run(self, trainable: Any, others: Any, x: Any) -> tuple[Any, Any]:
        """The output, and the layers' new variables that are not trained. Variables are lists, one for each layer."""
        values = {id(_inputs(self.layers[0])[0]): x}
        updated = []
        for layer, train, other in zip(self.layers, trainable, others, strict=True):
            args, kwargs = layer._inbound_nodes[0].arguments.fill_in(values)
            if _has_mode(layer):
                kwargs["training"] = True
            x, new = layer.stateless_call(train, other, *args, **kwargs)
            values[id(layer.output)] = x
            updated.append(new)
        return x, updated


def _has_mode(layer: Any) -> bool:
    return layer._call_has_training_arg


def _inputs(layer: Any) -> list[Any]:
    return layer._inbound_nodes[0].input_tensors


def segments(net: Any, prefix: str) -> list[Segment]:
    """The layers of a functional model in order, those of a block together.

    Raises `ValueError` if a block has more than one input or output.
    """
    layers = [layer for layer in net.layers if _inputs(layer)]

    def block_of(layer: Any) -> str | None:
        found = re.match(prefix, layer.name)
        return found and (found[1] if found.groups() else found[0])

    result = []
    for name, group in itertools.groupby(layers, block_of):
        members = list(group)
        result += [Segment(tuple(members), True)] if name else [Segment((one,), False) for one in members]
    _check(result)
    return result


def _check(parts: Sequence[Segment]) -> None:
    """Each segment reads the output of the one before it, and nothing else."""
    before = _inputs(parts[0].layers[0])[0]
    for part in parts:
        made = {id(layer.output) for layer in part.layers} | {id(before)}
        if any(id(t) not in made for layer in part.layers for t in _inputs(layer)):
            raise ValueError(f"the block of layer {part.layers[0].name} reads more than one tensor")
        before = part.layers[-1].output


def make(net: Any, parts: Sequence[Segment]) -> Callable[[Wrap], Loss]:
    """From a wrapper to the loss: cross entropy, and the variables that are not trained."""

    def build(wrap: Wrap) -> Loss:
        runs = [wrap(part.run) if part.wrapped else part.run for part in parts]

        def loss(trainable: Any, others: Any, images: Any, labels: Any) -> tuple[Any, Any]:
            x, updated = images, []
            own, state = _by_layer(net, trainable, "trainable"), _by_layer(net, others, "non_trainable")
            for part, run in zip(parts, runs, strict=True):
                x, new = run([own[id(a)] for a in part.layers], [state[id(a)] for a in part.layers], x)
                updated += new
            chosen = jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], axis=-1)
            return -chosen.mean(), updated

        return loss

    return build


def _by_layer(net: Any, values: Sequence[Any], kind: str) -> dict[int, list[Any]]:
    """The values of a model's variables, for each layer (by identity) those that belong to it."""
    known = {id(v): x for v, x in zip(getattr(net, f"{kind}_variables"), values, strict=True)}
    return {id(a): [known[id(v)] for v in getattr(a, f"{kind}_variables")] for a in net.layers}


def model(name: str) -> Model:
    """One of `CASES`."""
    case = CASES[name]
    net = network(case)
    return Model(
        make=make(net, segments(net, case.prefix)),
        args=example(net, case.pixels, case.batch, CLASSES),
        about=f"Keras `{case.application}`, {case.pixels} pixels, batch {case.batch}; a block is {case.block}",
        has_aux=True,
    )

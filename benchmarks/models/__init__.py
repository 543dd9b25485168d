"""The models of the policy benchmark, by name. Each is built when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.models import convolutional, recurrent, state_space, transformer
from benchmarks.models.model import Model


def _keras(name: str) -> Model:
    # Keras takes seconds to import, and chooses its backend then.
    from benchmarks.models import keras_applications

    return keras_applications.model(name)


MODELS: dict[str, Callable[[], Model]] = {
    "transformer": partial(transformer.model, scan=False, fuse=False),
    "transformer_scan": partial(transformer.model, scan=True, fuse=False),
    "transformer_fused": partial(transformer.model, scan=False, fuse=True),
    "transformer_fused_scan": partial(transformer.model, scan=True, fuse=True),
    "unet": convolutional.model,
    "lstm": recurrent.model,
    "mamba": state_space.model,
    "vgg19": partial(_keras, "vgg19"),
    "resnet50": partial(_keras, "resnet50"),
    "mobilenet": partial(_keras, "mobilenet"),
    "densenet121": partial(_keras, "densenet121"),
}

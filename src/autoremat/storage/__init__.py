"""Ways to keep a residual between the forward and the backward pass."""

from autoremat.storage._codec import CODECS as CODECS
from autoremat.storage._codec import Codec as Codec
from autoremat.storage._codec import codec_named as codec_named
from autoremat.storage._codec import codecs_for as codecs_for
from autoremat.storage._codec import offload as offload

DEVICE_NAME = "device"

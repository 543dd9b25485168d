"""How a program is divided among devices, where the compiler decides: specifications of the arguments, propagated."""

from autoremat.sharding._propagate import WHOLE as WHOLE
from autoremat.sharding._propagate import Shards as Shards
from autoremat.sharding._propagate import input_shardings as input_shardings
from autoremat.sharding._propagate import propagate as propagate
from autoremat.sharding._propagate import shards_of_arrays as shards_of_arrays
from autoremat.sharding._spec import Spec as Spec
from autoremat.sharding._spec import mesh_of as mesh_of
from autoremat.sharding._spec import spec_of as spec_of

"""The compiler's own account of a program: memory, and FLOPs counted one way for every program."""

from autoremat.measure._environment import environment as environment
from autoremat.measure._environment import package_version as package_version
from autoremat.measure._flops import jaxpr_flops as jaxpr_flops
from autoremat.measure._lower import abstract as abstract
from autoremat.measure._memory import MemoryUse as MemoryUse
from autoremat.measure._memory import compile_memory as compile_memory
from autoremat.measure._memory import default_compiler_options as default_compiler_options
from autoremat.measure._memory import measure as measure
from autoremat.measure._memory import memory_of as memory_of

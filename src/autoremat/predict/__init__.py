"""What a compiler will make of a program, without compiling it: kernels, their order, the peak."""

from autoremat.predict._compiler import XLA_CPU as XLA_CPU
from autoremat.predict._compiler import XLA_CPU_0_10 as XLA_CPU_0_10
from autoremat.predict._compiler import Compiler as Compiler
from autoremat.predict._peak import Moment as Moment
from autoremat.predict._predict import Prediction as Prediction
from autoremat.predict._predict import predict as predict

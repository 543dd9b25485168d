"""What to keep and what to compute again: problems, the judge, and the solvers. No JAX here."""

from autoremat.solve._binomial import Schedule as Schedule
from autoremat.solve._binomial import binomial as binomial
from autoremat.solve._binomial import forward_steps as forward_steps
from autoremat.solve._bound import LowerBound as LowerBound
from autoremat.solve._bound import Part as Part
from autoremat.solve._cut import cut as cut
from autoremat.solve._evaluate import Judge as Judge
from autoremat.solve._evaluate import close as close
from autoremat.solve._evaluate import evaluate as evaluate
from autoremat.solve._frontier import Frontier as Frontier
from autoremat.solve._frontier import frontier as frontier
from autoremat.solve._frontier import pareto as pareto
from autoremat.solve._frontier import splices as splices
from autoremat.solve._order import NoScheduleFoundError as NoScheduleFoundError
from autoremat.solve._order import ScheduleResult as ScheduleResult
from autoremat.solve._order import ScheduleStatus as ScheduleStatus
from autoremat.solve._order import schedule as schedule
from autoremat.solve._problem import Assignment as Assignment
from autoremat.solve._problem import Price as Price
from autoremat.solve._problem import Problem as Problem
from autoremat.solve._problem import Storage as Storage
from autoremat.solve._schedule import OpGraph as OpGraph
from autoremat.solve._schedule import Step as Step
from autoremat.solve._schedule import Timeline as Timeline
from autoremat.solve._schedule import alive as alive
from autoremat.solve._schedule import simulate as simulate

"""The exception tree.

AutorematError
├── BudgetError (ValueError)          a budget that cannot be read, or is not positive
├── InfeasibleBudgetError             below the floor: states the floor in bytes and the op that sets it
├── PlanError
│   ├── PlanMismatchError             a plan for another function, or other shapes: states what differs
│   └── PlanFileError                 a plan file that is damaged, or of another version
├── DifferentiationError (TypeError)  nothing to differentiate, or no scalar where one is needed
├── PolicyError (TypeError)           a policy that returns neither a decision nor a bool
├── EffectError (NotImplementedError) an effect that cannot run twice inside a checkpoint
├── CompileError                      the compiler failed, or ran out of memory
└── TargetError (ValueError)          a target that is unknown, or whose compiler is missing

AutorematWarning (UserWarning)
├── UnmatchedNameWarning              a policy names what no value carries
└── UnknownPrimitiveWarning           a primitive without a cost rule: a conservative default is used
"""


class AutorematError(Exception):
    """Base of all errors that autoremat raises on purpose."""


class BudgetError(AutorematError, ValueError):
    """A memory budget that cannot be read, or is not positive."""


class InfeasibleBudgetError(AutorematError):
    """No plan meets the budget of `budget_bytes`. `floor_bytes` is the least peak that was reached, `op` what sets it."""

    def __init__(self, message: str, *, floor_bytes: int = 0, budget_bytes: int = 0, op: str = "") -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.op = op


class PlanError(AutorematError):
    """A plan that cannot be used."""


class PlanMismatchError(PlanError):
    """A plan was applied to a function that it was not made for."""


class PlanFileError(PlanError):
    """A plan file is damaged, or was written by another version."""


class DifferentiationError(AutorematError, TypeError):
    """The function has nothing to differentiate, or returns no scalar where one is needed."""


class PolicyError(AutorematError, TypeError):
    """A policy returned neither a decision nor a bool."""


class EffectError(AutorematError, NotImplementedError):
    """An effect that may not run twice stands inside a checkpointed function that is differentiated."""


class CompileError(AutorematError):
    """The compiler failed, or ran out of memory: then `out_of_memory` is true, and another plan may compile."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class CostTableError(AutorematError, ValueError):
    """A file is no cost table, or a table was measured on another device, or for another program."""


class TargetError(AutorematError, ValueError):
    """A target that is unknown, or whose compiler is missing."""


class AutorematWarning(UserWarning):
    """Base of all warnings that autoremat gives."""


class UnmatchedNameWarning(AutorematWarning):
    """A policy names values that the function does not have. Check the spelling of the names."""


class UnknownPrimitiveWarning(AutorematWarning):
    """A primitive has no cost rule. Register one with `autoremat.register_cost`."""

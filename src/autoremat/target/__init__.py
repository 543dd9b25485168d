"""Where a program will run: this machine's backend, or a device that is elsewhere, for which its own compiler is installed here."""

from autoremat.target._list import TargetInfo as TargetInfo
from autoremat.target._list import targets as targets
from autoremat.target._target import Target as Target
from autoremat.target._target import resolve as resolve

"""Schedules as sets of reruns, with their memory kept up to date: what the local search moves in.

**Representation.** First executions follow the input order; *stage* `t` ends with the first execution of op `t`.
A rerun `(t, v)` executes op `v < t` again in stage `t`; reruns of one stage follow the input order. So an event has
the key `t * n + v`, and events run by rising key. A set of reruns is a whole schedule: every use reads the latest
copy, and a copy ends with the last use that reads it. Any set is a valid schedule, only its peak may be too high.

Chain of reruns: a rerun reads its inputs, which makes their copies live on to it, unless they run again in the
same stage.

**Complexity.** `add` and `remove` take O((inputs + consumers) · log n) steps in Python and as many slice additions
in NumPy. Both are exact inverses: the state is a function of the set.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np
import numpy.typing as npt

from autoremat.solve._schedule import OpGraph

Rerun = tuple[int, int]
"""(stage, op)"""


class Reruns:
    """A schedule given by its reruns. `over` bytes are what a budget is exceeded by, summed over events."""

    def __init__(self, graph: OpGraph, budget_bytes: int) -> None:
        n = len(graph)
        self.graph = graph
        self.budget = budget_bytes
        self.n = n
        self.consumers = graph.consumers()
        self.keys = [v * n + v for v in range(n)]
        self.starts = [[v * n + v] for v in range(n)]
        self.ends = [[max(row) * (n + 1) if row else v * (n + 1)] for v, row in enumerate(self.consumers)]
        self.cost = graph.base_cost
        self._dying = dict.fromkeys(self.keys, 0)
        self._memory = np.zeros(2 * n + 16, dtype=np.int64)
        for v in range(n):
            self._memory[v : self.ends[v][0] // n + 1] += graph.nbytes[v]
            self._dying[self.ends[v][0]] += graph.nbytes[v]

    @property
    def memory(self) -> npt.NDArray[np.int64]:
        """Bytes alive at each event; a view."""
        return self._memory[: len(self.keys)]

    def excess(self) -> npt.NDArray[np.int64]:
        """Bytes over the budget at each event."""
        return np.maximum(self.memory - self.budget, 0)

    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return int(self.memory.max()) <= self.budget

    def reruns(self) -> set[Rerun]:
        """The set that the schedule is."""
        return {divmod(key, self.n) for key in self.keys if key % (self.n + 1)}

    def schedule(self) -> tuple[int, ...]:
        """The ops in the order of execution."""
        return tuple(key % self.n for key in self.keys)

    def position(self, key: int) -> int:
        """Index of the first event that is not before `key`."""
        return bisect_left(self.keys, key)

    def copy_at(self, op: int, key: int) -> int:
        """Index of the copy of `op` that is the latest one before `key`; -1 if there is none."""
        return bisect_left(self.starts[op], key) - 1

    def last_use(self, op: int, after: int, before: int) -> int:
        """Key of the last use of `op` between two keys, both excluded; `after` if there is none."""
        found = after
        for u in self.consumers[op]:
            row = self.starts[u]
            i = bisect_left(row, before) - 1
            if i >= 0 and row[i] > found:
                found = row[i]
        return found

    def next_use(self, op: int, after: int) -> int:
        """Key of the first use of `op` after a key; -1 if there is none."""
        found = -1
        for u in self.consumers[op]:
            row = self.starts[u]
            i = bisect_right(row, after)
            if i < len(row) and (found < 0 or row[i] < found):
                found = row[i]
        return found

    def early(self, op: int, stage: int) -> int:
        """The last stage up to `stage` in which all inputs of `op` are there anyway."""
        key = stage * self.n + op
        end = min((self.ends[p][self.copy_at(p, key)] for p in self.graph.inputs[op]), default=key)
        if end >= key:
            return stage
        return end // self.n if end % self.n >= op else end // self.n - 1

    def has(self, stage: int, op: int) -> bool:
        """Whether `op` is executed in `stage`."""
        return stage * self.n + op in self._dying

    def add(self, stage: int, op: int) -> None:
        """Run `op` again in `stage`."""
        key = stage * self.n + op
        assert op < stage
        assert key not in self._dying
        i = self.copy_at(op, key)
        end = self.ends[op][i]
        self._insert(key)
        if end > key:
            self._set_end(op, i, self.last_use(op, self.starts[op][i], key))
        else:
            end = key
        self.starts[op].insert(i + 1, key)
        self.ends[op].insert(i + 1, end)
        self._dying[end] += self.graph.nbytes[op]
        self._memory[self.position(key) : self.position(end) + 1] += self.graph.nbytes[op]
        for p in self.graph.inputs[op]:
            j = self.copy_at(p, key)
            if self.ends[p][j] < key:
                self._set_end(p, j, key)
        self.cost += self.graph.cost[op]

    def remove(self, stage: int, op: int) -> None:
        """Undo `add`."""
        key = stage * self.n + op
        i = bisect_left(self.starts[op], key)
        assert op < stage
        assert self.starts[op][i] == key
        end = self.ends[op][i]
        self._memory[self.position(key) : self.position(end) + 1] -= self.graph.nbytes[op]
        self._dying[end] -= self.graph.nbytes[op]
        del self.starts[op][i], self.ends[op][i]
        if end > key:
            self._set_end(op, i - 1, end)
        for p in self.graph.inputs[op]:
            j = self.copy_at(p, key)
            if self.ends[p][j] == key:
                self._set_end(p, j, self.last_use(p, self.starts[p][j], key))
        self._delete(key)
        self.cost -= self.graph.cost[op]

    def useless(self, stage: int, op: int) -> bool:
        """Whether nothing reads what the rerun makes."""
        key = stage * self.n + op
        return self.ends[op][bisect_left(self.starts[op], key)] == key

    def replace(self, wanted: set[Rerun]) -> None:
        """Become the schedule of another set of reruns."""
        now = self.reruns()
        for stage, op in sorted(now - wanted):
            self.remove(stage, op)
        for stage, op in sorted(wanted - now):
            self.add(stage, op)

    def _set_end(self, op: int, i: int, end: int) -> None:
        old, size = self.ends[op][i], self.graph.nbytes[op]
        if end > old:
            self._memory[self.position(old) + 1 : self.position(end) + 1] += size
        elif end < old:
            self._memory[self.position(end) + 1 : self.position(old) + 1] -= size
        self._dying[old] -= size
        self._dying[end] += size
        self.ends[op][i] = end

    def _insert(self, key: int) -> None:
        """Make room for an event; what waits there is what is left of the event before."""
        at, length = self.position(key), len(self.keys)
        if length == len(self._memory):
            self._memory = np.concatenate([self._memory, np.zeros(length, dtype=np.int64)])
        self._memory[at + 1 : length + 1] = self._memory[at:length]
        self._memory[at] = self._memory[at - 1] - self._dying[self.keys[at - 1]]
        insort(self.keys, key)
        self._dying[key] = 0

    def _delete(self, key: int) -> None:
        at, length = self.position(key), len(self.keys)
        self._memory[at : length - 1] = self._memory[at + 1 : length]
        del self.keys[at]
        assert self._dying.pop(key) == 0

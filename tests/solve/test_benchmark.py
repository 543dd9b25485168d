"""The benchmark on published graphs, on a file of its form."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import graphs

CHAIN = {
    "graph": {"name": "chain"},
    "nodes": [
        {"id": i, "name": name, "cost_ram": ram, "cost_cpu": cpu}
        for i, (name, ram, cpu) in enumerate([("a", 4, 1), ("b", 3, 2), ("c", 5, 3), ("d", 1, 4)])
    ],
    "links": [{"source": s, "target": t} for s, t in [(0, 1), (1, 2), (0, 3), (2, 3)]],
}


def test_both_forms_of_file(tmp_path: Path) -> None:
    (tmp_path / "chain.json").write_text(json.dumps(CHAIN))
    layered = {
        "graph": {"order": [0, 2, 1]},
        "nodes": [{"name": v, "out_cost": 10 + v, "duration": v} for v in range(3)],
        "links": [{"0": 0, "1": 2}, {"0": 2, "1": 1}],
    }
    (tmp_path / "layered.json").write_text(json.dumps(layered))
    chain = graphs.load(tmp_path / "chain.json")
    assert (chain.nbytes, chain.cost) == ((4, 3, 5, 1), (1, 2, 3, 4))
    assert chain.inputs == ((), (0,), (1,), (0, 2))
    other = graphs.load(tmp_path / "layered.json")
    assert (other.nbytes, other.cost, other.inputs) == ((10, 12, 11), (0, 2, 1), ((), (0,), (1,)))
    assert other.names == ("0", "2", "1")


def test_the_table(tmp_path: Path) -> None:
    (tmp_path / "chain.json").write_text(json.dumps(CHAIN))
    options = ["--graphs", str(tmp_path), "--only", "chain", "--shares", "1,0.85,0.5", "--out", str(tmp_path)]
    assert graphs.main(options) == 0
    lines = (tmp_path / "graphs.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| chain")]
    assert [row[2:7] for row in rows] == [
        ["1", "balanced", "0.000", "0.000", "0.000"],
        ["0.85", "balanced", "10.000", "10.000", "0.000"],
        ["0.5", "balanced", "", "", ""],
    ]
    assert [row[9] for row in rows] == ["optimal", "optimal", "infeasible: floor 10, set by d"]

"""Two processes of one job, on this machine: they train with one plan, and refuse two different ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

JOB = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

index, port, mode, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
import autoremat as ar

mesh = Mesh(np.array(jax.devices()), ("data",))
whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

def array(value, sharding):
    return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

def loss(params, x):
    for w in params:
        x = x + jnp.tanh(jnp.exp(x @ w) @ w.T)
    return (x * x).mean()

@jax.jit
def train(params, x):
    value, gradient = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

rng = np.random.default_rng(0)
params = [array(rng.normal(size=(32, 32)).astype("float32") * 0.05, whole) for _ in range(4)]
x = array(rng.normal(size=(2048, 32)).astype("float32"), rows)
peak = ar.measure(train, params, x).peak_bytes
budget = int((0.95 if mode == "differ" and index else 0.85) * peak)
try:
    if mode == "file":
        plan = ar.Plan.load(f"{folder}/{index}.json")
        found = ar.fit(train, params, x, memory=peak, plan=plan)
    else:
        found = ar.fit(train, params, x, memory=budget, reserve=0)
        found.plan.save(f"{folder}/{index}.json")
    params, value = found.step(params, x)
    end = f"trained {found.plan.peak_bytes} {found.plan.checkpoints > 0} {float(value)}"
except ar.PlanMismatchError as error:
    end = f"refused {error}"
# Not to stdout: the library of the collectives writes there too, now and then in the middle of a line.
open(f"{folder}/{index}.txt", "w").write(end)
"""


def run(mode: str, folder: Path) -> list[str]:
    """What each process says in the end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", JOB]
    jobs = [
        subprocess.Popen(
            [*command, str(i), str(port), mode, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    done = [job.communicate(timeout=300) for job in jobs]
    for job, (_, err) in zip(jobs, done, strict=True):
        assert job.returncode == 0, err
    return [(folder / f"{i}.txt").read_text() for i in range(2)]


def test_two_processes_find_one_plan_and_load_one(tmp_path: Path) -> None:
    first = run("plan", tmp_path)
    assert first[0] == first[1]
    assert first[0].startswith("trained ")
    assert " True " in first[0]
    assert (tmp_path / "0.json").read_text().split('"seconds"')[0] == (tmp_path / "1.json").read_text().split('"seconds"')[0]  # fmt: skip
    assert run("file", tmp_path) == first


def test_two_processes_with_different_plans(tmp_path: Path) -> None:
    for line in run("differ", tmp_path):
        assert line.startswith("refused `autoremat.fit`: the 2 processes of this job have different plans")
        assert "Cheapest fix: make the plan in one process, save it, and load that file in all." in line

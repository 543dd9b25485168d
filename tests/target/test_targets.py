"""Targets: this machine, and devices that are elsewhere, compiled for by their own compilers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoremat as ar
from autoremat.target import _installed
from support.accelerators import needs_gpu, needs_tpu

ACCELERATORS = [pytest.param("tpu:v5e", marks=needs_tpu), pytest.param("gpu:h100", marks=needs_gpu)]
S = jax.ShapeDtypeStruct


def mlp(params: list[Any], x: Any) -> Any:
    for w in params:
        x = x + jnp.tanh(jnp.exp(x @ w) @ w.T)
    return (x * x).mean()


def example(layers: int = 3, width: int = 128, batch: int = 1024) -> tuple[Any, Any]:
    return [S((width, width), jnp.float32)] * layers, S((batch, width), jnp.float32)


def loop(w: Any, x: Any, length: int = 16) -> Any:
    """A loop that keeps results of each step. Compilers for TPUs take long over unrolled products, longer over
    sines, and little over this."""
    y, _ = lax.scan(lambda c, _: (jnp.tanh(jnp.exp(c @ w)), None), x, None, length=length)
    return y.astype(jnp.float32).sum()


LOOP = S((256, 256), jnp.float32), S((4096, 256), jnp.float32)


# ---------------------------------------------------------------------------------------------------------------- names


def test_this_machine() -> None:
    here = ar.target(None)
    assert here == ar.target("cpu") == ar.target(here)
    assert (here.name, here.platform, here.attached) == ("cpu", "cpu", True)
    assert here.compiler.startswith("jaxlib ")
    assert here.devices == tuple(jax.devices())


def test_the_list_has_every_device() -> None:
    found = {t.name: t for t in ar.targets()}
    assert {"cpu", "tpu:v5e", "tpu:v5p", "tpu:v6e", "gpu:a100-80gb", "gpu:h100", "gpu:h200"} <= set(found)
    assert [t.name for t in found.values() if t.attached] == ["cpu"]
    for t in found.values():
        assert bool(t.compiler) != bool(t.problem)
        assert (t.install == "") == (t.problem == "")


@pytest.mark.parametrize("name", ["tpu", "gpu", "cuda"])
def test_a_backend_that_is_not_here_needs_a_model(name: str) -> None:
    with pytest.raises(ar.TargetError, match=r"this machine's backend is 'cpu'.*Cheapest fix: one of "):
        ar.target(name)


def versions(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    monkeypatch.setattr(_installed, "_version", lambda package: installed.get(package.replace("-", "_"), ""))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpu:v6e:2x2", r"needs its compiler, and libtpu is not installed\. Cheapest fix: pip install \"autoremat\[tpu\]\""),
        ("gpu:h200", r"jax-cuda12-plugin and jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12 are not installed.*autoremat\[gpu\]"),
    ],
)  # fmt: skip
def test_a_missing_compiler(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch)
    from autoremat.target._topology import devices

    devices.cache_clear()
    with pytest.raises(ar.TargetError, match=message):
        ar.plan(mlp, *example(), budget="50%", target=name)
    assert 'pip install "autoremat[' in {t.name: t.install for t in ar.targets()}[name.replace(":2x2", "")]


def test_a_compiler_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, libtpu="0.0.1")
    with pytest.raises(
        ar.TargetError, match=r"libtpu 0\.0\.1 does not belong to JAX .*, which needs libtpu=="
    ):
        _installed.LIBTPU.check("tpu:v5e")


@needs_tpu
def test_a_topology_that_does_not_exist() -> None:
    with pytest.raises(
        ar.TargetError, match=r"knows no such devices.*Cheapest fix: \"tpu:v5e\" for one device"
    ):
        ar.target("tpu:v5e:3x3")


@needs_tpu
@pytest.mark.parametrize(("name", "count"), [("tpu:v5p", 1), ("tpu:v5p:2x2x1", 4), ("tpu:v6e:4x4", 16)])
def test_devices_that_are_not_there(name: str, count: int) -> None:
    found = ar.target(name)
    assert (found.name, found.platform, found.attached) == (name, "tpu", False)
    assert len(found.devices) == count
    assert found.compiler.startswith("libtpu ")


# -------------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("name", ACCELERATORS)
def test_measured_for_a_device_that_is_not_there(name: str) -> None:
    """Arguments and outputs are what they are; of the temporaries the compilers differ, so only their size is known."""
    params, x = example()
    use = ar.measure(jax.value_and_grad(mlp), params, x, target=name)
    arguments = sum(p.size for p in params) * 4 + x.size * 4
    assert use.argument_bytes == arguments
    assert use.output_bytes == pytest.approx(sum(p.size for p in params) * 4, rel=0.01)
    assert use.peak_bytes >= arguments + x.size * 4
    assert use.fits


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_plan_for_a_device_that_is_not_there(name: str) -> None:
    """What is verified is what the user would compile, and its values are those of the function."""
    plan = ar.plan(loop, *LOOP, budget="70%", target=name)
    assert plan.target == name
    assert plan.checkpoints > 0
    assert plan.peak_bytes <= plan.budget_bytes < (plan.unplanned_bytes or 0)
    again = ar.measure(jax.value_and_grad(plan.apply(loop)), *LOOP, target=name)
    assert again.peak_bytes == plan.peak_bytes
    assert plan.environment["compiler"] == ar.target(name).compiler
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s.shape) * 0.03, jnp.float32) for s in LOOP)
    ours, theirs = (jax.value_and_grad(f)(w, x) for f in (plan.apply(loop), loop))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, theirs)


@needs_tpu
def test_a_program_that_does_not_fit_its_device() -> None:
    """The compiler refuses it and names what it needs, which is read; a plan within a share of that compiles."""
    w, x = S((4096, 4096), jnp.bfloat16), S((16384, 4096), jnp.bfloat16)

    def loss(w: Any, x: Any) -> Any:
        return loop(w, x, 120)

    use = ar.measure(jax.value_and_grad(loss), w, x, target="tpu:v5e")
    memory = ar.target("tpu:v5e").device.memory_bytes
    assert not use.fits
    assert use.peak_bytes > memory
    assert use.argument_bytes == (w.size + x.size) * 2
    assert use.argument_bytes + use.output_bytes + use.temp_bytes == use.peak_bytes
    plan = ar.plan(loss, w, x, budget=memory, target="tpu:v5e")
    assert plan.peak_bytes <= memory
    assert plan.unplanned_bytes == use.peak_bytes
    assert any("does not fit tpu:v5e" in note for note in plan.notes)


@needs_tpu
def test_a_budget_that_the_device_does_not_have() -> None:
    with pytest.raises(
        ar.BudgetError, match=r"got a budget of 17,179,869,184 bytes, but a tpu:v5e has 16,911,433,728"
    ):
        ar.plan(mlp, *example(), budget="16GiB", target="tpu:v5e")


# --------------------------------------------------------------------------------------------------------------- sharded


def sharded(mesh: Any) -> tuple[Any, Any]:
    params, x = example()
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    return [S(p.shape, p.dtype, sharding=whole) for p in params], S(x.shape, x.dtype, sharding=rows)


def host_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("data",))


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        pytest.param("tpu:v5e:2x2", (host_mesh, lambda: ar.target("tpu:v5e:2x2").mesh((4,), ("data",))), marks=needs_tpu),
        pytest.param("gpu:h100:4", (lambda: AbstractMesh((4,), ("data",)),), marks=needs_gpu),
    ],
)  # fmt: skip
def test_sizes_are_those_of_one_device(name: str, meshes: tuple[Callable[[], Any], ...]) -> None:
    """A mesh of the host's devices, or an abstract one, is moved to the target's."""
    for make in meshes:
        params, x = sharded(make())
        use = ar.measure(jax.value_and_grad(mlp), params, x, target=name)
        assert use.argument_bytes == sum(p.size for p in params) * 4 + x.size * 4 // 4


@needs_tpu
def test_a_target_of_another_size() -> None:
    with pytest.raises(ar.TargetError, match=r"sharded over 4 devices, and target 'tpu:v5e' has 1\."):
        ar.measure(jax.value_and_grad(mlp), *sharded(host_mesh()), target="tpu:v5e")
    with pytest.raises(
        ar.TargetError, match=r"a mesh of 2x4 needs 8 devices, and target 'tpu:v5e:2x2' has 4"
    ):
        ar.target("tpu:v5e:2x2").mesh((2, 4), ("data", "model"))


# ----------------------------------------------------------------------------------------------------------------- start

QUIET = """
import autoremat, jax
autoremat.targets()
print(jax.config.jax_platforms, jax.default_backend())
"""


@pytest.mark.parametrize(("chosen", "expected"), [("", "cpu cpu"), ("cpu", "cpu cpu")])
def test_jax_starts_with_the_cpu_where_there_is_nothing_else(chosen: str, expected: str) -> None:
    if any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "dxg", "kfd", "accel0", "vfio/0")):
        pytest.skip("this machine has an accelerator")
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment |= {"JAX_PLATFORMS": chosen} if chosen else {}
    done = subprocess.run(
        [sys.executable, "-c", QUIET], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected

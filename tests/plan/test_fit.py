"""Whole training steps, fitted into a memory: any step that takes a gradient, as the user wrote and jitted it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoremat as ar
from support.accelerators import needs_tpu

WIDTH, LAYERS, BATCH = 64, 6, 4096
ADAM = optax.adam(1e-2)
Step = Callable[..., Any]


def layer(x: Any, w: Any) -> Any:
    return x + jnp.tanh(jnp.exp(x @ w) @ w.T)


def loss(params: Any, x: Any) -> Any:
    for w in params:
        x = layer(x, w)
    return (x * x).mean()


def step(params: Any, state: Any, x: Any) -> Any:
    """A plain step with Adam."""
    value, gradient = jax.value_and_grad(loss)(params, x)
    updates, state = ADAM.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


def plain() -> tuple[Step, tuple[Any, ...]]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) * 0.05 for k in keys[1:]]
    x = jax.random.normal(keys[0], (BATCH, WIDTH))
    return jax.jit(step, donate_argnums=(0, 1)), (params, ADAM.init(params), x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(LAYERS):
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(WIDTH)(x)))
        return x


def flax_linen() -> tuple[Step, tuple[Any, ...]]:
    from flax.training.train_state import TrainState

    net, x = Net(), jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), x), tx=ADAM)

    def train(state: Any, x: Any) -> Any:
        def of(params: Any) -> Any:
            return (state.apply_fn(params, x) ** 2).mean()

        value, gradient = jax.value_and_grad(of)(state.params)
        return state.apply_gradients(grads=gradient), value

    return jax.jit(train, donate_argnums=0), (state, x)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.dropout(self.down(nnx.gelu(self.up(x))))


def flax_nnx() -> tuple[Step, tuple[Any, ...]]:
    """What NNX differentiates can be called only once, and returns the state of its random numbers."""
    net = nnx.Sequential(*(Block(nnx.Rngs(i)) for i in range(LAYERS)))
    graph, state = nnx.split((net, nnx.Optimizer(net, ADAM, wrt=nnx.Param)))

    def train(state: Any, x: Any) -> Any:
        net, optimizer = nnx.merge(graph, state)
        value, gradient = nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
        optimizer.update(net, gradient)
        return nnx.state((net, optimizer)), value

    return jax.jit(train, donate_argnums=0), (state, jax.random.normal(jax.random.key(1), (BATCH, WIDTH)))


def equinox() -> tuple[Step, tuple[Any, ...]]:
    net = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, LAYERS, activation=jax.nn.gelu, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_array)
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))

    def train(params: Any, state: Any, x: Any) -> Any:
        @eqx.filter_value_and_grad
        def of(model: Any) -> Any:
            return (jax.vmap(model)(x) ** 2).mean()

        value, gradient = of(eqx.combine(params, static))
        updates, state = ADAM.update(gradient, state, params)
        return eqx.apply_updates(params, updates), state, value

    return jax.jit(train, donate_argnums=(0, 1)), (params, ADAM.init(params), x)


def copies(args: Any) -> Any:
    return jax.tree.map(jnp.array, args)


def assert_close(a: Any, b: Any, tolerance: float = 2e-4) -> None:
    def array(x: Any) -> Any:
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(array(x), array(y), rtol=tolerance, atol=tolerance), a, b
    )  # fmt: skip


@pytest.mark.parametrize("make", [plain, flax_linen, flax_nnx, equinox])
def test_a_step_fits(make: Callable[[], tuple[Step, tuple[Any, ...]]]) -> None:
    """Within the memory, as compiled; the same results; and an account that adds up to what the compiler says."""
    train, args = make()
    whole = ar.measure(train, *args)
    memory = int(0.7 * whole.peak_bytes)
    found = ar.fit(train, *args, memory=memory, reserve="2%")
    assert found.plan.peak_bytes <= memory - found.reserve_bytes
    assert found.reserve_bytes == memory * 2 // 100
    assert found.plan.checkpoints > 0
    compiled = found.step.lower(*args).compile(compiler_options=found.plan.compiler_options)
    use = ar.MemoryUse.read(compiled, 0.0)
    assert use.peak_bytes == found.plan.peak_bytes
    assert use.alias_bytes > 0
    assert found.account.total == pytest.approx(use.peak_bytes, rel=0.02)
    assert_close(found.step(*copies(args)), train(*copies(args)))


def test_the_account() -> None:
    train, (params, state, x) = plain()
    whole = ar.measure(train, params, state, x)
    found = ar.fit(train, params, state, x, memory=int(0.7 * whole.peak_bytes))
    size = sum(p.nbytes for p in params)
    account, before = found.account, found.unplanned_account
    assert account.parameters == size
    assert account.optimizer_state == 2 * size + 4
    assert account.batch == x.nbytes
    assert account.gradients == size
    assert account.outputs < 1000
    assert before is not None
    assert before.total == whole.peak_bytes
    assert before.activations > account.activations > 0
    assert not any("Activations are not" in note for note in found.notes)
    for text in ("optimizer state", "activations", "What fills the memory", "gradient of loss on cpu"):
        assert text in found.report


def test_a_step_that_fits_as_it_is() -> None:
    train, args = plain()
    found = ar.fit(train, *args, memory="1GiB")
    assert found.plan.checkpoints == 0
    assert found.plan.recompute_flops == 0
    assert found.account.total == ar.measure(train, *args).peak_bytes
    assert_close(found.step(*copies(args)), train(*copies(args)))


def test_a_step_that_is_not_jitted() -> None:
    train, args = plain()
    memory = int(0.7 * ar.measure(step, *args).peak_bytes)
    found = ar.fit(step, *args, memory=memory)
    assert found.plan.peak_bytes <= memory
    assert_close(found.step(*args), train(*copies(args)))


def test_a_step_that_ran_before() -> None:
    """JAX has its trace in a cache, in which there is no plan; and afterwards it is the one without a plan again."""
    train, args = plain()
    expected = train(*copies(args))
    whole = ar.measure(train, *args)
    found = ar.fit(train, *args, memory=int(0.7 * whole.peak_bytes))
    assert found.plan.checkpoints > 0
    assert_close(found.step(*copies(args)), expected)
    assert ar.measure(train, *args).peak_bytes == whole.peak_bytes
    assert "autoremat" not in str(jax.make_jaxpr(train)(*args))
    assert "autoremat" in str(jax.make_jaxpr(found.step)(*args))


def test_gradients_of_microbatches_in_a_loop() -> None:
    """What is differentiated stands inside a loop, and is planned all the same."""
    params = plain()[1][0]
    x = jax.random.normal(jax.random.key(5), (4, BATCH, WIDTH))

    def train(params: Any, x: Any) -> Any:
        def body(total: Any, batch: Any) -> Any:
            gradient = jax.grad(loss)(params, batch)
            return jax.tree.map(jnp.add, total, gradient), None

        total, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, params), x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, total)

    whole = ar.measure(train, params, x)
    found = ar.fit(train, params, x, memory=int(0.8 * whole.peak_bytes))
    assert found.plan.peak_bytes <= 0.8 * whole.peak_bytes
    assert_close(found.step(params, x), train(params, x))


def test_of_two_gradients_the_one_that_keeps_most() -> None:
    params = plain()[1][0]
    x = jax.random.normal(jax.random.key(5), (BATCH, WIDTH))

    def critic(params: Any, x: Any) -> Any:
        return jnp.sin(layer(x, params[0])).mean()

    def generator(params: Any, x: Any) -> Any:
        return loss(params, x)

    def train(params: Any, x: Any) -> Any:
        return jax.grad(critic)(params, x), jax.grad(generator)(params, x)

    whole = ar.measure(train, params, x)
    found = ar.fit(train, params, x, memory=int(0.8 * whole.peak_bytes))
    assert found.plan.function == "generator"
    assert any("other gradients, too" in note and "critic" in note for note in found.notes)
    assert_close(found.step(params, x), train(params, x))


def test_checkpoints_of_the_user_stay_where_nothing_is_planned() -> None:
    """Those in what is planned are replaced, as by `autoremat.plan`."""
    params = plain()[1][0]
    x = jax.random.normal(jax.random.key(5), (BATCH, WIDTH))

    def small(params: Any, x: Any) -> Any:
        return jax.checkpoint(layer)(x, params[0]).mean()

    def large(params: Any, x: Any) -> Any:
        return loss([params[0]], jax.checkpoint(lambda x: loss_of(params, x))(x))

    def loss_of(params: Any, x: Any) -> Any:
        for w in params:
            x = layer(x, w)
        return x

    def train(params: Any, x: Any) -> Any:
        return jax.grad(small)(params, x), jax.grad(large)(params, x)

    found = ar.fit(train, params, x, memory="1GiB")
    assert found.plan.function == "large"
    assert found.plan.recompute_flops == 0
    assert any("holds 1 checkpoint(s) already" in note for note in found.notes)
    assert ar.jaxpr_flops(found.step, params, x) < ar.jaxpr_flops(train, params, x)
    written = str(jax.make_jaxpr(found.step)(params, x))
    assert written.count("remat") + written.count("checkpoint") > 0
    assert_close(found.step(params, x), train(params, x))


def test_what_is_differentiated_twice_is_planned_once() -> None:
    """A penalty on the gradient: the inner one is a part of what is planned."""
    params = plain()[1][0][:3]
    x = jax.random.normal(jax.random.key(5), (BATCH, WIDTH))

    def penalized(params: Any, x: Any) -> Any:
        return loss(params, x) + sum((g * g).sum() for g in jax.grad(loss)(params, x))

    def train(params: Any, x: Any) -> Any:
        return jax.grad(penalized)(params, x)

    whole = ar.measure(train, params, x)
    memory = int(0.98 * whole.peak_bytes)
    found = ar.fit(train, params, x, memory=memory, reserve=0, effort="fast")
    assert found.plan.function == "penalized"
    assert found.plan.peak_bytes <= memory
    assert_close(found.step(params, x), train(params, x), 1e-3)


def test_other_threads_are_left_alone() -> None:
    """While a step is traced for a plan, gradients elsewhere are JAX's own."""
    train, args = plain()
    stop, wrong = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(x).sum()))(jnp.ones(3))
            if "autoremat" in str(jaxpr):
                wrong.append(jaxpr)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        ar.fit(train, *args, memory=int(0.8 * ar.measure(train, *args).peak_bytes))
    finally:
        stop.set()
        thread.join()
    assert not wrong


# ---------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_is_saved_and_used_again(tmp_path: Path) -> None:
    train, args = plain()
    memory = int(0.7 * ar.measure(train, *args).peak_bytes)
    first = ar.fit(train, *args, memory=memory)
    first.plan.save(tmp_path / "plan.json")
    again = ar.fit(train, *args, memory=memory, plan=ar.Plan.load(tmp_path / "plan.json"))
    assert again.plan.decisions == first.plan.decisions
    assert again.plan.peak_bytes == first.plan.peak_bytes
    assert again.plan.compiles == 1
    assert_close(again.step(*copies(args)), first.step(*copies(args)), 0)


def test_a_plan_for_another_step(tmp_path: Path) -> None:
    train, args = plain()
    found = ar.fit(train, *args, memory=int(0.7 * ar.measure(train, *args).peak_bytes))
    params, _, x = args
    with pytest.raises(
        ar.PlanMismatchError,
        match=r"made for `loss` with \d+ operations, and the step differentiates others: loss",
    ):
        ar.fit(train, params[:3], ADAM.init(params[:3]), x, memory="1GiB", plan=found.plan)  # fmt: skip
    with pytest.raises(ar.PlanMismatchError, match=r"for none of what `step` differentiates \(loss\)"):
        found.step(params[:3], ADAM.init(params[:3]), x)


def test_a_plan_that_no_longer_fits() -> None:
    train, args = plain()
    whole = ar.measure(train, *args).peak_bytes
    found = ar.fit(train, *args, memory=int(0.8 * whole))
    with pytest.raises(
        ar.BudgetError, match=r"compiled here, the plan needs [\d,]+ bytes, and there are [\d,]+"
    ):
        ar.fit(train, *args, memory=whole // 2, plan=found.plan)


# ------------------------------------------------------------------------------------------------------------ other ends


def test_activations_are_not_what_fills_the_memory() -> None:
    w = jnp.ones((1024, 1024))
    x = jnp.ones((8, 1024))

    def train(w: Any, moment: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.sin(x @ w).mean())(w)
        moment = 0.9 * moment + gradient
        return w - 0.1 * moment, moment

    found = ar.fit(jax.jit(train, donate_argnums=(0, 1)), w, w, x, memory="1GiB")
    (note,) = (n for n in found.notes if n.startswith("Activations are not what fills the memory"))
    assert "parameters (4,194,304 bytes)" in note
    assert "What would help: " in note


def test_sharded_over_devices() -> None:
    """The batch is divided: the memory is that of one device."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    train, (params, state, x) = plain()
    args = (*jax.device_put((params, state), whole), jax.device_put(x, rows))
    alone, divided = ar.measure(train, params, state, x), ar.measure(train, *args)
    assert divided.peak_bytes < alone.peak_bytes / 2
    memory = int(0.8 * divided.peak_bytes)
    found = ar.fit(train, *args, memory=memory, reserve=0)
    assert found.plan.peak_bytes <= memory
    assert found.account.batch == x.nbytes // 4
    assert found.account.total == pytest.approx(found.plan.peak_bytes, rel=0.02)
    assert_close(found.step(*copies(args)), train(params, state, x))


@needs_tpu
def test_for_a_device_that_is_not_there() -> None:
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((4096, 256), jnp.float32)

    def train(w: Any, moment: Any, x: Any) -> Any:
        def of(w: Any) -> Any:
            y, _ = lax.scan(lambda c, _: (jnp.tanh(jnp.exp(c @ w)), None), x, None, length=16)
            return y.sum()

        moment = 0.9 * moment + jax.grad(of)(w)
        return w - 0.1 * moment, moment

    train = jax.jit(train, donate_argnums=(0, 1))
    whole = ar.measure(train, w, w, x, target="tpu:v5e")
    found = ar.fit(train, w, w, x, memory=int(0.7 * whole.peak_bytes), reserve=0, target="tpu:v5e")
    assert found.plan.peak_bytes <= 0.7 * whole.peak_bytes
    assert found.account.total == pytest.approx(found.plan.peak_bytes, rel=0.02)
    everything = ar.fit(train, w, w, x, target="tpu:v5e")
    assert everything.memory_bytes == ar.target("tpu:v5e").device.memory_bytes
    assert everything.plan.checkpoints == 0


def test_the_largest_batch() -> None:
    """Larger than what fits as it is, and one more multiple was tried in vain."""
    train, (params, state, x) = plain()
    memory = ar.measure(train, params, state, x[:256]).peak_bytes
    size, found = ar.largest_batch(
        train, params, state, x[:128], batch=2, multiple=128, memory=memory, reserve=0, effort="fast"
    )
    assert size % 128 == 0
    assert size > 256
    assert found.plan.peak_bytes <= memory
    assert found.account.batch == size * WIDTH * 4
    assert not any("may fit" in note for note in found.notes)
    more = jax.ShapeDtypeStruct((size + 128, WIDTH), x.dtype)
    assert ar.measure(train, params, state, more).peak_bytes > memory


# ------------------------------------------------------------------------------------------------------------- bad input


def test_bad_input() -> None:
    train, args = plain()
    with pytest.raises(
        ar.BudgetError, match=r'does not know how much memory a CPU may use\. Cheapest fix: memory="16GiB"'
    ):
        ar.fit(train, *args)  # fmt: skip
    with pytest.raises(ar.BudgetError, match=r"needs bytes, such as \"16GiB\"; got '50%', a share"):
        ar.fit(train, *args, memory="50%")
    with pytest.raises(
        ar.BudgetError, match=r"`autoremat\.fit\(reserve=\.\.\.\)`: got .* which leaves nothing"
    ):
        ar.fit(train, *args, memory="1MB", reserve="2MB")
    with pytest.raises(ValueError, match=r"`autoremat\.fit\(effort=\.\.\.\)` needs \"fast\""):
        ar.fit(train, *args, memory="1GB", effort="most")
    with pytest.raises(ar.TargetError, match=r"no target is called 'tpu:v9'"):
        ar.fit(train, *args, target="tpu:v9")


def test_a_step_without_a_gradient() -> None:
    with pytest.raises(
        ar.DifferentiationError, match=r"`autoremat\.fit\(forward, \.\.\.\)`: the step takes no gradient"
    ):
        ar.fit(forward, plain()[1][0], memory="1GB")  # fmt: skip


def forward(params: Any) -> Any:
    return loss(params, jnp.ones((4, WIDTH)))


def test_a_memory_that_nothing_meets() -> None:
    train, args = plain()
    with pytest.raises(
        ar.InfeasibleBudgetError, match=r"`autoremat\.fit\(loss, budget=\.\.\.\)`: got [\d,]+ bytes"
    ) as caught:
        ar.fit(train, *args, memory="2MB")  # fmt: skip
    assert caught.value.floor_bytes > caught.value.budget_bytes == 1_900_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 7}, r"got 7, and there are 3 arguments"),
        ({"batch": 0}, r"holds arrays of shapes .*, which share no leading axis"),
    ],
)
def test_what_is_no_batch(options: dict[str, Any], message: str) -> None:
    train, (params, state, x) = plain()
    with pytest.raises(ValueError, match=message):
        ar.largest_batch(train, [*params, jnp.ones(3)], state, x, memory="1GB", **options)

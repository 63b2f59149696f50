"""Training on JAX: one device, or all devices with `keras.distribution`."""

import contextlib
import functools

import jax
import jax.export
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils

from routing_tf.training.engines.step import Engine
from routing_tf.training.engines.step import split_batch


class JaxEngine(Engine):
    """Runs training steps on JAX devices, over which the batch is spread.

    Weights are the same on all devices, as `keras.distribution.DataParallel` places
    them; a layer sees the global batch, and XLA adds the sums over devices.

    Args:
        distribution: a `keras.distribution.DataParallel`; None for one device.
    """

    def __init__(self, distribution=None):
        self.distribution = distribution
        self._rows = self._stacked_rows = None
        if distribution is not None:
            self.num_devices = distribution.device_mesh.devices.size
            self.num_workers, self.worker = jax.process_count(), jax.process_index()
            mesh = distribution.device_mesh.backend_mesh
            axis = distribution.batch_dim_name
            spec = jax.sharding.PartitionSpec
            self._rows = jax.sharding.NamedSharding(mesh, spec(axis))
            self._stacked_rows = jax.sharding.NamedSharding(mesh, spec(None, axis))
        self._step = self._state = None
        self._is_fresh = True

    @classmethod
    def of(cls, strategy, tpu=None, num_virtual_devices=None):
        """Makes the engine of a strategy; see `engines.make`."""
        if tpu is not None:
            raise ValueError(
                "`tpu` is for TensorFlow; JAX finds the TPU of its machine. Received: "
                f"tpu={tpu!r}. Use only --strategy=tpu"
            )
        if num_virtual_devices:
            _cut_cpu(num_virtual_devices)
        if strategy == "one":
            return cls()
        if strategy == "multi_worker":
            _connect()
        devices = keras.distribution.list_devices()
        if strategy == "tpu" and not devices[0].startswith("tpu"):
            raise ValueError(
                "The strategy 'tpu' needs a machine with a TPU and the package "
                f"jax[tpu]. Received: devices {devices}"
            )
        return cls(
            keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
        )

    @property
    def description(self):
        """A short description for people."""
        platform = jax.devices()[0].platform
        if self.distribution is None:
            return f"one device ({platform})"
        machines = f" of {self.num_workers} workers" if self.num_workers > 1 else ""
        return f"{self.num_devices} devices ({platform}){machines}, DataParallel"

    def scope(self):
        """A context in which to make the model and its optimizer."""
        if self.distribution is None:
            return contextlib.nullcontext()
        return self.distribution.scope()

    def compile(self, step, steps_per_call=1, jit_compile=True):
        """Compiles a training step; see `TensorFlowEngine.compile`.

        The variables of the model are out of date until `sync` is called.
        """
        del jit_compile  # JAX has nothing else.
        if step is not self._step:
            self._step, self._state, self._is_fresh = step, None, True
        train = functools.partial(one_step, step)

        def many(state, batches, number):
            numbers = number + jnp.arange(steps_per_call, dtype=number.dtype)
            return jax.lax.scan(
                lambda state, x: train(state, *x), state, (batches, numbers)
            )

        compiled = None
        if step.num_parts == 1:
            compiled = self._jit(step, train if steps_per_call == 1 else many)
        call_parts = self._compile_parts(step)

        def call(batches, first_step):
            number = jnp.int32(first_step)
            state, self._state = self._take_state(), None
            if compiled is None:
                self._state, report = call_parts(state, batches[0], number)
            elif steps_per_call == 1:
                batch = self._distribute(batches[0], self._rows)
                self._state, report = compiled(state, batch, number)
            else:
                stacked = keras.tree.map_structure(lambda *x: np.stack(x), *batches)
                stacked = self._distribute(stacked, self._stacked_rows)
                self._state, report = compiled(state, stacked, number)
            report = np.asarray(report)
            return [step.report(row) for row in report.reshape(-1, report.shape[-1])]

        return call

    def lower(self, step, batch, platform=None):
        """Returns the StableHLO text from which XLA compiles a step on one device.

        The `platform`, such as `"tpu"`, need not be available; None for this machine's.
        """
        compiled = self._jit(step, functools.partial(one_step, step))
        export = jax.export.export(compiled, platforms=platform and [platform])
        values = [variable.value for variable in step.variables]
        return str(export(values, batch, jnp.int32(0)).mlir_module())

    def compile_scorer(self, lm, score):
        """Compiles a function that scores a batch, spread over the devices.

        See `TensorFlowEngine.compile_scorer`.
        """
        mesh = self._rows.mesh
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

        @functools.partial(jax.jit, out_shardings=whole)
        def compiled(values, batch):
            with keras.StatelessScope(list(zip(lm.variables, values))):
                return score(batch)

        def call(batch):
            rows = len(keras.tree.flatten(batch)[0])
            # Rows that pad the batch of the last device are dropped.
            number = -(-rows // self.num_devices) * self.num_devices
            own = np.arange(number).reshape(self.num_workers, -1)[self.worker] % rows
            batch = keras.tree.map_structure(lambda x: np.asarray(x)[own], batch)
            values = [variable.value for variable in lm.variables]
            return np.asarray(compiled(values, self._distribute(batch, self._rows)))[
                :rows
            ]

        return call

    def gather(self, number):
        """Returns a number from each worker; all must call it together."""
        if self.num_workers == 1:
            return np.array([number])
        return multihost_utils.process_allgather(np.array(number))

    def sync(self):
        """Writes the state of the last call into the variables."""
        if self._state is None:
            return
        for variable, value in zip(self._step.variables, self._state, strict=True):
            variable.assign(value)
        self._state = None

    def _take_state(self):
        """The state, which the next call overwrites in place."""
        if self._state is not None:
            return self._state
        values = [variable.value for variable in self._step.variables]
        if self._is_fresh:
            # Initial values may share memory.
            values = [jnp.copy(value) for value in values]
            self._is_fresh = False
        return values

    def _jit(self, step, train):
        """Compiles; the new state takes the memory and the sharding of the old one."""
        shardings = [variable.value.sharding for variable in step.variables]
        return jax.jit(
            train,
            donate_argnums=0,
            out_shardings=None if self.distribution is None else (shardings, None),
        )

    def _compile_parts(self, step):
        """A call for each part: memory holds one part's activations."""

        def first(totals, state, batch, number):
            return _differentiate(step, state, batch, number, 0, totals)

        def further(results, totals, state, batch, number, part):
            *sums, written = results
            state = step.with_written(state, written)
            *more, written = _differentiate(step, state, batch, number, part, totals)
            return *jax.tree.map(jnp.add, sums, more), written

        count = jax.jit(step.counts)
        first = jax.jit(first)
        further = jax.jit(further, donate_argnums=0)
        finish = self._jit(step, lambda state, results: _finish(step, state, results))

        def call(state, batch, number):
            parts = [
                self._distribute(part, self._rows)
                for part in split_batch(batch, step.num_parts)
            ]
            numbered = [(part, number, jnp.int32(i)) for i, part in enumerate(parts)]
            counts = [count(state, *part) for part in numbered]
            totals = [sum(count) for count in zip(*counts, strict=True)]
            results = first(totals, state, parts[0], number)
            for part in numbered[1:]:
                results = further(results, totals, state, *part)
            return finish(state, results)

        return call

    def _distribute(self, batch, sharding):
        """Places a worker's batch; the batches of all workers are one."""
        if sharding is None:
            return batch
        return keras.tree.map_structure(
            lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)),
            batch,
        )


def one_step(step, state, batch, number):
    """One step in one call."""
    return _finish(step, state, _differentiate(step, state, batch, number, 0))


def _differentiate(step, state, batch, number, part, totals=None):
    """Gradients of one part, its sums, and the state that it wrote."""
    number_of_weights = len(step.lm.trainable_variables)

    def objective(trainable):
        values = [*trainable, *state[number_of_weights:]]
        value, *others = step.objective(values, batch, number, part, totals=totals)
        return value, others

    compute = jax.value_and_grad(objective, has_aux=True)
    (_, (sums, written)), gradients = compute(state[:number_of_weights])
    return gradients, sums, written


def _finish(step, state, results):
    """The new state and the report."""
    gradients, sums, written = results
    variables = step.variables
    with keras.StatelessScope(list(zip(variables, state))) as scope:
        gradients, is_finite, report = step.finish(gradients, sums)
        step.update(gradients, sums["statistics"])
        step.keep(written, is_finite)
        updated = [scope.get_current_value(variable) for variable in variables]
    state = [
        jnp.where(is_finite, new, old) for new, old in zip(updated, state, strict=True)
    ]
    with keras.StatelessScope(list(zip(variables, state))) as scope:
        step.count(is_finite)
        return [scope.get_current_value(variable) for variable in variables], report


def _cut_cpu(number):
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as error:
        raise ValueError(
            "`num_virtual_devices` must be set before JAX is used. Received: "
            f"num_virtual_devices={number}: {error}"
        ) from error


def _connect():
    """Joins the processes that the environment names."""
    try:
        keras.distribution.initialize()
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            "The strategy 'multi_worker' needs KERAS_DISTRIBUTION_JOB_ADDRESSES, "
            "KERAS_DISTRIBUTION_NUM_PROCESSES and KERAS_DISTRIBUTION_PROCESS_ID. "
            f"Received: {error}"
        ) from error

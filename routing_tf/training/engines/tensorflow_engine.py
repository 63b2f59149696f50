"""Training on TensorFlow: one device, or the replicas of a `tf.distribute` strategy."""

import functools
import os
import socket

import keras
import numpy as np
import tensorflow as tf

from routing_tf.layers.support.replicas import sum_over_replicas
from routing_tf.training.engines.step import Engine
from routing_tf.training.engines.step import split_batch


class TensorFlowEngine(Engine):
    """Runs training steps on the replicas of a `tf.distribute` strategy.

    Args:
        strategy: a `tf.distribute.Strategy`.

    Example:

    ```python
    from routing_tf.training import engines

    engine = engines.make("one")
    assert engine.num_replicas == 1
    ```
    """

    def __init__(self, strategy):
        self.strategy = strategy
        self.num_replicas = self.num_devices = strategy.num_replicas_in_sync
        resolver = strategy.cluster_resolver
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            cluster = resolver.cluster_spec().as_dict()
            chiefs, workers = cluster.get("chief", []), cluster.get("worker", [])
            self.num_workers = max(1, len(chiefs) + len(workers))
            is_worker = resolver.task_type == "worker"
            self.worker = (resolver.task_id or 0) + is_worker * len(chiefs)

    @classmethod
    def of(cls, strategy, tpu=None, num_virtual_devices=None):
        """Makes the engine of a strategy; see `engines.make`."""
        if num_virtual_devices:
            _cut_cpu(num_virtual_devices)
        if strategy == "mirrored":
            devices = tf.config.list_logical_devices("GPU")
            devices = devices or tf.config.list_logical_devices("CPU")
            names = [device.name for device in devices]
            return cls(tf.distribute.MirroredStrategy(names))
        if strategy == "multi_worker":
            _check_cluster()
            return cls(tf.distribute.MultiWorkerMirroredStrategy())
        if strategy == "tpu":
            return cls(_tpu_strategy(tpu))
        return cls(tf.distribute.get_strategy())

    @property
    def description(self):
        """A short description for people."""
        if self.num_replicas == 1:
            has_gpu = tf.config.list_logical_devices("GPU")
            return f"one device ({'gpu' if has_gpu else 'cpu'})"
        name = type(self.strategy).__name__
        if isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy):
            name = "MultiWorkerMirroredStrategy"  # its class has another one
        machines = f" on {self.num_workers} workers" if self.num_workers > 1 else ""
        return f"{self.num_replicas} replicas{machines}, {name}"

    def scope(self):
        """A context in which to make the model and its optimizer."""
        return self.strategy.scope()

    def compile(self, step, steps_per_call=1, jit_compile=True):
        """Compiles a training step.

        Args:
            step: a `TrainingStep` of a model that was made in `scope`.
            steps_per_call: number of steps that one call takes.
            jit_compile: whether XLA compiles it, on one device only. (A TPU's strategy
                always compiles.)

        Returns:
            A function of `steps_per_call` batches of this worker and the number of the
            first step, which trains and returns a `Report` for each step.
        """
        options = self._options(jit_compile)
        if step.num_parts > 1:
            return self._compile_parts(step, options)
        train = functools.partial(self._train, step)

        def many(batches, number):
            def body(index, reports):
                def train_at(batches, index):
                    batch = tf.nest.map_structure(lambda x: x[index], batches)
                    return train(batch, number + tf.cast(index, number.dtype))

                report = self._first(self.strategy.run(train_at, (batches, index)))
                return index + 1, reports.write(index, report)

            size = step.report_size
            reports = tf.TensorArray(tf.float32, steps_per_call, element_shape=(size,))
            _, reports = tf.while_loop(
                lambda index, _: index < steps_per_call, body, (0, reports)
            )
            return reports.stack()

        compiled = self._compile_one(step, options)
        if steps_per_call > 1:
            compiled = tf.function(many, **options)

        def call(batches, first_step):
            number = tf.constant(first_step, tf.int64)
            if steps_per_call == 1:
                return [step.report(compiled(self._distribute(batches[0]), number))]
            stacked = keras.tree.map_structure(lambda *x: np.stack(x), *batches)
            reports = compiled(self._distribute(stacked, axis=1), number)
            return [step.report(report) for report in reports.numpy()]

        return call

    def lower(self, step, batch):
        """Returns the HLO text from which XLA compiles a step.

        The step has no parts and runs on one device.
        """
        compiled = self._compile_one(step, self._options(jit_compile=True))
        batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
        lower = compiled.experimental_get_compiler_ir(batch, tf.constant(0, tf.int64))
        return lower(stage="hlo")

    def compile_scorer(self, lm, score):
        """Compiles a function that scores a batch, spread over the replicas.

        `score` takes a structure of tensors with the batch on axis 0 and returns one
        such tensor; the compiled function does the same with NumPy arrays. It uses the
        replicas of this worker, and each worker scores the whole batch.
        """
        del lm
        compiled = tf.function(
            lambda batch: self.strategy.run(score, (batch,)), autograph=False
        )
        local = self.num_replicas // self.num_workers

        def call(batch):
            rows = len(keras.tree.flatten(batch)[0])
            # Rows that pad the batch of the last replica are dropped.
            index = np.arange(-(-rows // local) * local) % rows
            batch = keras.tree.map_structure(lambda x: np.asarray(x)[index], batch)
            results = self.strategy.experimental_local_results(
                compiled(self._distribute(batch))
            )
            return np.concatenate([x.numpy() for x in results])[:rows]

        return call

    def gather(self, number):
        """Returns a number from each worker; all must call it together."""
        if self.num_workers == 1:
            return np.array([number])
        row = np.zeros((1, self.num_workers), "float64")
        row[0, self.worker] = number
        # The first replica speaks for its worker.
        rows = np.zeros((self.num_devices // self.num_workers, self.num_workers))
        rows[:1] = row
        return self._sum(self._distribute(rows)).numpy()[0]

    @functools.cached_property
    def _sum(self):
        def add(values):
            # As in `_finish`.
            return sum_over_replicas([tf.identity(values)])[0]

        return tf.function(
            lambda values: self._first(self.strategy.run(add, (values,))),
            autograph=False,
        )

    def sync(self):
        """Does nothing, because variables are always up to date."""

    def _options(self, jit_compile):
        jit_compile = (jit_compile and self.num_replicas == 1) or None
        return {"jit_compile": jit_compile, "autograph": False}

    def _compile_one(self, step, options):
        """One step in one call."""
        train = functools.partial(self._train, step)
        return tf.function(
            lambda batch, number: self._first(
                self.strategy.run(train, (batch, number))
            ),
            **options,
        )

    def _train(self, step, batch, number):
        """A step on one replica."""
        return self._finish(step, *self._differentiate(step, batch, number, 0))

    def _compile_parts(self, step, options):
        """A call for each part: memory holds one part's activations."""

        def count(batch, number, part):
            def counts(*arguments):
                own = step.counts(_values(step), *arguments, _replica())
                return sum_over_replicas([tf.identity(x) for x in own])

            return self.strategy.run(counts, (batch, number, part))

        def first(totals, batch, number):
            def differentiate(totals, *x):
                return self._differentiate(step, *x, 0, totals=totals)

            return self.strategy.run(differentiate, (totals, batch, number))

        def further(totals, results, batch, number, part):
            def differentiate(totals, results, *x):
                *sums, written = results
                *more, written = self._differentiate(step, *x, written, totals)
                return *tf.nest.map_structure(tf.add, sums, more), written

            arguments = totals, results, batch, number, part
            return self.strategy.run(differentiate, arguments)

        def finish(results):
            report = self.strategy.run(lambda x: self._finish(step, *x), (results,))
            return self._first(report)

        def add(*counts):
            return self.strategy.run(lambda x: [sum(y) for y in zip(*x)], (counts,))

        count, first, further, finish, add = (
            tf.function(function, **options)
            for function in (count, first, further, finish, add)
        )

        def call(batches, first_step):
            number = tf.constant(first_step, tf.int64)
            parts = split_batch(batches[0], step.num_parts)
            parts = [self._distribute(part) for part in parts]
            indices = [tf.constant(index) for index in range(step.num_parts)]
            numbered = [(part, number, i) for part, i in zip(parts, indices)]
            totals = add(*(count(*part) for part in numbered))
            results = first(totals, parts[0], number)
            for part in numbered[1:]:
                results = further(totals, results, *part)
            return [step.report(finish(results))]

        return call

    def _differentiate(self, step, batch, number, part, written=None, totals=None):
        """Gradients of one part on one replica, its sums, and what it wrote."""
        values = _values(step)
        if written is not None:
            values = step.with_written(values, written)
        trainable = values[: len(step.lm.trainable_variables)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trainable)
            value, sums, written = step.objective(
                values, batch, number, part, _replica(), totals
            )
        gradients = tape.gradient(
            value, trainable, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return gradients, sums, written

    def _finish(self, step, gradients, sums, written):
        """Updates one replica with the sums of all; the same on each."""
        values = tf.nest.flatten((gradients, sums))
        # A plain input of `strategy.run` has no device on which to add it up.
        values = sum_over_replicas([tf.identity(value) for value in values])
        gradients, sums = tf.nest.pack_sequence_as((gradients, sums), values)
        gradients, is_finite, report = step.finish(gradients, sums)

        def update():
            step.update(gradients, sums["statistics"])
            return 0

        tf.cond(is_finite, update, lambda: 0)
        step.keep(written, is_finite)
        step.count(is_finite)
        return report

    def _distribute(self, batch, axis=0):
        """Gives each replica of this worker its rows of the worker's batch."""
        if self.num_replicas == 1:
            return batch
        local = self.num_replicas // self.num_workers
        first = self.worker * local

        def rows(array, index):
            size = array.shape[axis] // local
            own = [slice(None)] * array.ndim
            own[axis] = slice(index * size, (index + 1) * size)
            return tf.convert_to_tensor(array[tuple(own)])

        def values(context):
            index = context.replica_id_in_sync_group - first
            return tf.nest.map_structure(lambda x: rows(np.asarray(x), index), batch)

        return self.strategy.experimental_distribute_values_from_function(values)

    def _first(self, values):
        """The result of the first replica; all return the same."""
        return self.strategy.experimental_local_results(values)[0]


def _values(step):
    """The values of the variables of a step on this replica."""
    return [tf.convert_to_tensor(variable.value) for variable in step.variables]


def _replica():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def _cut_cpu(number):
    device = tf.config.list_physical_devices("CPU")[0]
    configuration = [tf.config.LogicalDeviceConfiguration()] * number
    try:
        tf.config.set_logical_device_configuration(device, configuration)
    except RuntimeError as error:
        raise ValueError(
            "`num_virtual_devices` must be set before TensorFlow is used. Received: "
            f"num_virtual_devices={number}: {error}"
        ) from error


def _check_cluster():
    """Raises a ValueError if TensorFlow would take this machine for all machines."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        missing = None if resolver.cluster_spec().jobs else "no cluster"
    except ValueError as error:
        missing = error
    if missing:
        raise ValueError(
            "The strategy 'multi_worker' needs TF_CONFIG, which names the cluster and "
            "the task of this machine in it. Received: TF_CONFIG="
            f"{os.environ.get('TF_CONFIG', '')!r}: {missing}"
        )


def _tpu_strategy(tpu):
    """Connects to a TPU and starts it."""
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu or "")
        _check_reachable(resolver.master())
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError) as error:
        raise ValueError(
            "`tpu` must name a TPU that this machine reaches ('local' on a TPU VM). "
            f"Received: tpu={tpu!r}: {error}"
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def _check_reachable(address):
    """Raises an OSError if TensorFlow would try to connect forever."""
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    if address.startswith("grpc://") and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=20).close()

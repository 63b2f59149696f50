"""Tests of one step of training, on one device."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf.training import engines
from routing_tf.training.engines.step import Report
from routing_tf.training.engines.step import TrainingStep
from routing_tf.training.engines.step import split_batch
from tests.engines import small_runs
from tests.models import small_models

pytestmark = pytest.mark.usefixtures("eager")
TOLERANCE = 1e-5
# Batches with few tokens, and with rows without any and whole ones.
STEPS = 2
SCALING = {"initial_scale": 2.0**10, "dynamic_growth_steps": 3}


def run_of(**options):
    return small_runs.Run(engines.make(), **{"num_steps": STEPS, **options})


def assert_equals_whole_batches(**options):
    options = {"num_steps": STEPS, **options}
    run = run_of(**options)
    run.train()
    whole = small_runs.on_one_device(**options)
    difference, where = small_runs.largest_difference(whole, run.state())
    print(f"{options}: {difference:.1e} in {where}")
    assert difference <= TOLERANCE, where


class TestParts:
    def test_four_parts_give_the_numbers_of_the_whole_batch(self):
        """Some parts have no token, some all."""
        assert_equals_whole_batches(num_parts=4)

    @pytest.mark.thorough
    def test_parts_of_a_model_with_an_encoder(self):
        assert_equals_whole_batches(num_parts=4, kind="seq2seq")

    def test_a_batch_is_split_by_rows(self):
        batch = {"x": np.arange(6), "y": (np.arange(12).reshape(6, 2),)}
        parts = split_batch(batch, 3)
        assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
        assert parts[1]["y"][0].tolist() == [[4, 5], [6, 7]]

    def test_state_that_a_pass_writes_goes_from_part_to_part(self):
        run = run_of(kind="text", num_parts=2, changes=small_runs.WATCHED)
        names = [v.name for v in run.training_step.variables]
        run.train(1)
        other = run_of(kind="text", changes=small_runs.WATCHED)
        inputs, _, _ = other.batch(0)
        for part in split_batch(inputs, 2):
            other.lm(part, training=True)
        found, expected = run.state(), other.state()
        for name in ("moving_mean", "moving_variance", "mean", "num_calls"):
            key = f"{names.index(name)} {name}"
            assert expected[key].any()
            np.testing.assert_allclose(found[key], expected[key], 1e-5, 1e-6, name)


def optimized_by(name):
    return {"optimizer": name, "weight_decay": 0.5}


class TestSteps:
    @pytest.mark.slow
    @pytest.mark.usefixtures("compiled")
    def test_four_steps_in_a_call_are_four_calls(self):
        """Some of them without an update."""
        options = {"changes": {"residual_dropout": 0.2}, "num_steps": 8}
        traps = {"2": [5], "3": [1]}
        assert_equals_whole_batches(steps_per_call=4, traps=traps, **options)

    @pytest.mark.parametrize(
        "kind, changes",
        [
            ("decoder", {}),
            pytest.param("decoder", optimized_by("muon"), marks=pytest.mark.thorough),
            pytest.param("losses", {}, marks=pytest.mark.thorough),
            pytest.param("text", small_runs.WATCHED, marks=pytest.mark.thorough),
        ],
    )
    def test_a_step_is_one_of_keras(self, kind, changes):
        """Loss, clipping, weight decay and all state are those of `Model.fit`."""
        run = run_of(kind=kind, changes=changes)
        reports = run.train()
        trained = run.state()
        other = run_of(kind=kind, changes=changes)
        other.lm.compile(
            optimizer=other.lm.optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            ),
        )
        losses = []
        for step in range(STEPS):
            x, targets, weights = other.batch(step)
            data = {"x": x, "y": targets, "sample_weight": weights}
            history = keras.Model.fit(other.lm, **data, batch_size=8, verbose=0)
            losses.append(history.history["loss"][0])
        np.testing.assert_allclose([report.loss for report in reports], losses, 1e-5)
        for name, value in other.state().items():
            if name[0].isdigit():
                np.testing.assert_allclose(trained[name], value, 1e-4, 1e-5, name)


WITH_EXPERTS = {"feed_forward": "mixture_of_experts", "weight_decay": 0.0}


class TestLossesByName:
    def reports(self, num_parts=1, **changes):
        changes = {**WITH_EXPERTS, **changes}
        run = run_of(kind="text", num_parts=num_parts, changes=changes)
        return run, run.train()

    @pytest.mark.parametrize(
        "num_parts", [1, pytest.param(2, marks=pytest.mark.thorough)]
    )
    def test_they_are_parts_of_the_loss_beside_that_of_clusters(self, num_parts):
        run, reports = self.reports(num_parts)
        for report in reports:
            assert list(report.named_losses) == ["load_balancing_loss"]
            parts = [report.cross_entropy, report.clustering_loss]
            parts += report.named_losses.values()
            assert min(parts) > 0
            np.testing.assert_allclose(report.loss, sum(parts), rtol=1e-6)
        (experts,) = (
            block.feed_forward
            for block in run.lm.backbone.blocks
            if hasattr(block.feed_forward, "num_experts")
        )
        balance = float(ops.convert_to_numpy(experts.statistics["load_balancing_loss"]))
        assert balance > 0.5
        found = reports[-1].named_losses["load_balancing_loss"]
        np.testing.assert_allclose(found, 0.01 * balance, rtol=1e-5)

    @pytest.mark.thorough
    def test_they_keep_their_names_where_gradients_compute_again(self):
        changes = {"routing": "indexed", "commitment_weight": 0.5}
        _, expected = self.reports(**changes)
        _, reports = self.reports(**changes, remat=True)
        for one, other in zip(expected, reports, strict=True):
            assert list(one.named_losses) == ["indexer_loss", "load_balancing_loss"]
            for name, loss in one.named_losses.items():
                assert loss > 0
                np.testing.assert_allclose(other.named_losses[name], loss, rtol=1e-4)
            np.testing.assert_allclose(other.clustering_loss, one.clustering_loss)
            np.testing.assert_allclose(other.loss, one.loss, rtol=1e-5)


class TestNumbersThatAreNotFinite:
    @pytest.mark.usefixtures("compiled")
    def test_change_nothing_but_the_number_of_steps(self):
        """One row of the second part has a bad gradient."""
        run = run_of(traps={"2": [5]})
        run.train(2)
        before = run.state()
        (report,) = run.train(1)
        after = run.state()
        assert not report.is_finite
        assert np.isfinite(report.loss)
        names = [variable.name for variable in run.lm.trainable_variables]
        is_bad = ~np.isfinite(report.gradient_squares)
        assert np.array(names)[is_bad].tolist() == ["bait"]
        changed = changed_variables(before, after)
        assert [name.split()[1] for name in changed] == ["iteration"]
        assert after[changed[0]] == before[changed[0]] + 1 == 3
        (report,) = run.train(1)
        assert report.is_finite
        changed = changed_variables(after, run.state())
        assert {"bait", "centroids", "counts", "sums", "iteration"} <= {
            name.split()[1] for name in changed
        }


def changed_variables(before, after):
    """Names of the variables that are not the same to the bit."""
    return [
        name
        for name, value in before.items()
        if name[0].isdigit() and not np.array_equal(value, after[name])
    ]


def apply_as_keras_does(optimizer, gradient, variable):
    if keras.backend.backend() == "tensorflow":
        optimizer.apply([gradient], [variable])
        return
    # The other way leaks a tracer on JAX.
    values = [value.value for value in optimizer.variables]
    _, values = optimizer.stateless_apply(values, [gradient], [variable.value])
    for old, new in zip(optimizer.variables, values, strict=True):
        old.assign(new)


class TestLossScale:
    @pytest.mark.thorough
    def test_moves_as_that_of_keras(self):
        is_finite = [bool(int(digit)) for digit in "1110101101"]
        own = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), **SCALING)
        variable = keras.Variable(np.ones(2, "float32"))
        own.build([variable])
        traps = {str(step): [3] for step, good in enumerate(is_finite) if not good}
        run = run_of(traps=traps, loss_scaling=SCALING)
        scaling, used = run.lm.optimizer, []
        for good in is_finite:
            used.append(float(own.dynamic_scale))
            apply_as_keras_does(own, ops.ones(2) * (1.0 if good else np.nan), variable)
            (report,) = run.train(1)
            assert report.is_finite == good
            assert report.loss_scale == used[-1]
            assert float(scaling.dynamic_scale) == float(own.dynamic_scale)
            assert int(scaling.step_counter) == int(own.step_counter)
        assert len(set(used)) > 3
        # Unlike that of Keras ours counts the steps of a run.
        assert int(scaling.iterations) == len(is_finite)

    @pytest.mark.thorough
    def test_changes_no_number(self):
        run = run_of(loss_scaling=SCALING)
        run.train()
        own = ("_scale", "step_counter", "iteration", "learning_rate")

        def values(state):
            return {name: x for name, x in state.items() if not name.endswith(own)}

        expected = values(small_runs.on_one_device(num_steps=STEPS))
        found = values(run.state()).values()
        for value, (name, wanted) in zip(found, expected.items(), strict=True):
            np.testing.assert_allclose(value, wanted, 1e-4, 1e-5, err_msg=name)

    @pytest.mark.thorough
    def test_an_overflow_in_float16_halves_it(self):
        scaling = {"initial_scale": 2.0**17, "dynamic_growth_steps": 1000}
        run = run_of(precision="mixed_float16", loss_scaling=scaling)
        before = run.state()
        reports = run.train(11)
        is_finite = [report.is_finite for report in reports]
        num_skipped = is_finite.index(True)
        assert 0 < num_skipped < 6
        assert reports[num_skipped].loss_scale == 2.0 ** (17 - num_skipped)
        losses = [report.loss for report in reports]
        assert np.isfinite(losses).all()
        # The same weights up to there, on batches of the same kind.
        assert losses[-1] < losses[0]
        assert changed_variables(before, run.state())


@pytest.mark.thorough
def test_short_floats_train_centroids_in_float32():
    run = run_of(precision="mixed_float16", loss_scaling=SCALING)
    reports = run.train()
    expected = small_runs.on_one_device(num_steps=STEPS)
    losses = [report.loss for report in reports]
    np.testing.assert_allclose(losses, expected["loss"], rtol=0.05)
    assert losses != expected["loss"].tolist()
    for kmeans in small_models.kmeans_layers(run.lm):
        for variable in (kmeans.centroids, kmeans.counts, kmeans.sums):
            value = ops.convert_to_numpy(variable)
            assert value.dtype == np.float32
            # More digits than short floats have.
            assert (value != value.astype("float16").astype("float32")).any()
    for variable in run.training_step.variables:
        assert variable.dtype in ("float32", "int32", "int64", "uint32")


@pytest.fixture(scope="module")
def run():
    return run_of(num_parts=2, changes={"residual_dropout": 0.5})


def objective(run, batch, step=0, part=0, replica=0, training_step=None):
    training_step = training_step or run.training_step
    values = [ops.convert_to_tensor(variable) for variable in training_step.variables]
    inputs, targets, weights = batch
    inputs = {name: ops.convert_to_tensor(x) for name, x in inputs.items()}
    batch = inputs, ops.convert_to_tensor(targets), ops.convert_to_tensor(weights)
    step = ops.convert_to_tensor(step, "int32")
    return training_step.objective(values, batch, step, part, replica)


class TestObjective:
    """What a part of a step on one replica computes, without an engine."""

    def test_each_part_step_and_replica_draws_apart(self, run):
        batch = small_runs.make_batch("decoder", 2)
        places = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1)]
        values = [float(objective(run, batch, *place)[0]) for place in places]
        assert len(set(values)) == len(places)
        assert values[1] == float(objective(run, batch, *places[1])[0])

    def test_a_run_that_goes_on_draws_what_it_would_have_drawn(self, run):
        """The states of the generators do not matter, the step alone does."""
        batch = small_runs.make_batch("decoder", 2)
        before = float(objective(run, batch, step=7)[0])
        generators = [
            variable
            for variable in run.lm.non_trainable_variables
            if variable.name == "seed_generator_state"
        ]
        assert generators
        for variable in generators:
            variable.assign([5, 11])
        assert float(objective(run, batch, step=7)[0]) == before

    def test_losses_count_by_tokens(self, run):
        lengths = (24, 3, 0, 0, 1, 0, 0, 0)
        batch = small_runs.make_batch("decoder", 0, lengths=lengths)
        _, sums, _ = objective(run, batch)
        assert float(sums["weight"]) == 28
        squares = sum(
            float(ops.sum(ops.square(variable)))
            for variable in run.lm.trainable_variables
            if variable.regularizer is not None
        )
        assert float(sums["decay"]) == pytest.approx(28 * 0.005 * squares, rel=1e-5)
        assert float(sums["clustering"]) > 0
        assert len(sums["statistics"]) == 2

    def test_batches_of_padding_alone_are_finite(self, run):
        batch = small_runs.make_batch("decoder", 0, lengths=(0,) * 8)
        step = TrainingStep(run.lm, run.lm.optimizer)
        value, sums, _ = objective(run, batch, training_step=step)
        assert float(value) == 0
        gradients = [ops.zeros(v.shape) for v in run.lm.trainable_variables]
        _, is_finite, report = step.finish(gradients, sums)
        assert bool(is_finite)
        report = Report.of(ops.convert_to_numpy(report))
        assert (report.loss, report.num_tokens, report.gradient_norm) == (0, 0, 0)

    @pytest.mark.parametrize("clip_norm", [0.0, 0.25, 1e9])
    def test_gradients_are_clipped_by_their_global_norm(self, run, clip_norm):
        step = TrainingStep(run.lm, run.lm.optimizer, clip_norm)
        batch = small_runs.make_batch("decoder", 2)
        _, sums, _ = objective(run, batch, training_step=step)
        ones = [ops.ones(v.shape) for v in run.lm.trainable_variables]
        gradients, is_finite, report = step.finish(ones, sums)
        assert bool(is_finite)
        report = Report.of(ops.convert_to_numpy(report))
        count = sum(int(np.prod(v.shape)) for v in run.lm.trainable_variables)
        assert report.gradient_norm == pytest.approx(count**0.5, rel=1e-5)
        norm = sum(float(ops.sum(ops.square(g))) for g in gradients) ** 0.5
        expected = min(report.gradient_norm, clip_norm or np.inf)
        assert norm == pytest.approx(expected, rel=1e-5)
        assert len(report.gradient_squares) == len(ones)
        assert step.report_size == 6 + len(ones)

    @pytest.mark.parametrize(
        "bad, where", [(np.nan, "gradient"), (-np.inf, "gradient"), (np.inf, "nats")]
    )
    def test_one_bad_number_is_enough(self, run, bad, where):
        step = TrainingStep(run.lm, run.lm.optimizer, clip_norm=1.0)
        batch = small_runs.make_batch("decoder", 2)
        _, sums, _ = objective(run, batch, training_step=step)
        gradients = [np.zeros(v.shape, "float32") for v in run.lm.trainable_variables]
        if where == "nats":
            sums["nats"] = ops.convert_to_tensor(np.float32(bad))
        else:
            gradients[3].flat[-1] = bad
        gradients = [ops.convert_to_tensor(gradient) for gradient in gradients]
        _, is_finite, report = step.finish(gradients, sums)
        assert not bool(is_finite)
        report = Report.of(ops.convert_to_numpy(report))
        assert not report.is_finite
        bad_ones = np.flatnonzero(~np.isfinite(report.gradient_squares))
        assert bad_ones.tolist() == ([] if where == "nats" else [3])

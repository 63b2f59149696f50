import dataclasses
import os
import shutil
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

from routing_tf import models
from routing_tf import optimizers
from routing_tf import problems
from routing_tf import training
from routing_tf.models.release import conversion
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.training import checkpoints
from routing_tf.training import engines
from routing_tf.training import evaluation
from routing_tf.training import loading
from routing_tf.training import run_folder
from routing_tf.training.engines.step import Report
from tests import golden_cases
from tests import runs
from tests import small_problems as small_problems
from tests.models import small_models
from tests.small_problems import interrupted
from tests.small_problems import press

pytestmark = pytest.mark.usefixtures("eager")

LENGTH = 32


def tiny(**changes):
    own = "num_routed_heads=1,num_clusters=3,routing=expert_choice,learning_rate=0.02"
    return runs.settings(f"{runs.HPARAMS},{own},train_steps=6").replace(**changes)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    generator = np.random.default_rng(0)
    words = [b"cluster ", b"token ", b"head\n", b"\xc3\xa9t\xc3\xa9 "]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(words[i] for i in generator.integers(0, 4, 3000)))
    return str(path)


@pytest.fixture(scope="module")
def configure(text_file):
    """Makes settings and problem of a run on that file."""

    def configure(seed=0, init_checkpoint=None, **changes):
        options = {"seed": seed, "init_checkpoint": init_checkpoint}
        options["problem_options"] = {"files": text_file}
        return run_folder.configure("text_files", tiny(**changes), **options)

    return configure


@pytest.fixture(scope="module")
def finished(configure, tmp_path_factory):
    """A trainer at the end of a short run; not to be trained on."""
    config, problem = configure(train_steps=20)
    trainer = training.Trainer(config, problem, tmp_path_factory.mktemp("finished"))
    trainer.result = trainer.train(
        eval_every=10, eval_examples=4, checkpoint_every=6, log_every=5
    )
    return trainer


def state(trainer):
    variables = trainer.lm.weights + trainer.lm.optimizer.variables
    return [np.asarray(variable) for variable in variables]


def assert_same_end(one, other):
    """Asserts that two runs of four steps have the same losses and variables."""
    for value, expected in zip(state(one), state(other), strict=True):
        np.testing.assert_array_equal(value, expected)
    losses = [
        [entry["loss"] for entry in runs.metrics(trainer.model_dir, "loss")]
        for trainer in (one, other)
    ]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


def assert_same_weights(lm, other):
    small_models.assert_equal(*(small_models.arrays(x.weights) for x in (lm, other)))


class StandInEngine:
    """An engine whose steps compute nothing: for what the loop makes of their reports.

    Args:
        bad_steps: numbers of the steps, from 1, that report a loss of NaN.
        happens: dict of functions by the number of a step, called in its middle.
    """

    def __init__(self, bad_steps=(), happens=None):
        self._engine = engines.make()
        self.bad_steps, self.happens = bad_steps, happens or {}

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def compile(self, step, steps_per_call, jit_compile):
        def train(batches, first_step):
            numbers = range(first_step + 1, first_step + 1 + steps_per_call)
            return [self._report(number) for number in numbers]

        return train

    def _report(self, number):
        self.happens.get(number, lambda: None)()
        loss = np.nan if number in self.bad_steps else 1.0
        named = {"load_balancing_loss": 0.25}
        return Report(loss, loss, 0.0, 128.0, 1.0, 1.0, np.ones(1), named)


@pytest.fixture
def stand_in(configure, tmp_path):
    """Makes trainers that compute neither steps nor scores."""

    def make(bad_steps=(), happens=None, steps_per_call=1, **changes):
        engine = StandInEngine(bad_steps, happens)
        options = {"engine": engine, "steps_per_call": steps_per_call}
        trainer = training.Trainer(*configure(**changes), tmp_path, **options)
        trainer.scorer.score = lambda inputs, targets: np.ones(targets.shape)
        return trainer

    return make


def steps_with(key, model_dir):
    return [entry["step"] for entry in runs.metrics(model_dir, key)]


class TestTrainer:
    def test_the_loss_falls(self, finished):
        steps = runs.metrics(finished.model_dir, "loss")
        assert [entry["step"] for entry in steps] == [5, 10, 15, 20]
        assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
        schedule = training.make_schedule(finished.config.hyperparameters)
        for entry in steps:
            rate = float(schedule(entry["step"] - 1))
            assert entry["learning_rate"] == pytest.approx(rate)
            assert entry["bits_per_byte"] == pytest.approx(entry["loss"] / np.log(2))
            assert entry["clustering_loss"] > 0
            assert entry["tokens_per_second"] > 0
        tag = "occupancy/block_0/attention/routed_heads"
        last = steps[-1]
        assert 0 <= last[f"{tag}/min"] <= 1 / 3 <= last[f"{tag}/max"] <= 1
        assert 0 <= last[f"{tag}/entropy"] <= 1 + 1e-9

    def test_held_out_text_is_scored_on_the_way(self, finished):
        key = "held_out_bits_per_byte"
        entries = runs.metrics(finished.model_dir, key)
        scores = {entry["step"]: entry[key] for entry in entries}
        assert list(scores) == [0, 10, 20]
        assert scores[20] == finished.result.bits
        assert scores[20] < scores[10] < scores[0]

    def test_tensorboard_has_the_same_numbers(self, finished):
        (path,) = (finished.model_dir / "tensorboard").iterdir()
        found = {}
        for raw in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(raw)
            for value in event.summary.value:
                found[event.step, value.tag] = float(tf.make_ndarray(value.tensor))
        for entry in runs.metrics(finished.model_dir):
            step = entry.pop("step")
            for name, value in entry.items():
                assert found[step, name] == pytest.approx(value, rel=1e-5)

    def test_the_model_of_a_run_is_loaded(self, finished):
        for source in (
            finished.model_dir,
            checkpoints.paths(finished.model_dir)[-1],
            checkpoints.paths(finished.model_dir, "best")[-1],
        ):
            loaded = loading.load_language_model(source)
            assert_same_weights(loaded, finished.lm)
        assert loaded.generate("token", max_length=8).startswith("token")

    def test_resume_equals_an_uninterrupted_run(self, configure, tmp_path):
        """One that Ctrl-C ended in its third step."""
        config, problem = configure(
            residual_dropout=0.2,
            weight_decay=1e-3,
            gradient_clip_norm=0.5,
            exploring_queries=4,
            train_steps=4,
        )
        options = {"eval_examples": 1, "eval_every": 2, "log_every": 1}
        whole = training.Trainer(config, problem, tmp_path / "whole")
        whole.train(**options)
        first = training.Trainer(config, problem, tmp_path / "parts")
        handler = signal.getsignal(signal.SIGINT)
        with pytest.MonkeyPatch.context() as patch:
            read = problem.dataset
            patch.setattr(
                problem, "dataset", lambda *a, **k: interrupted(read(*a, **k), *a)
            )
            assert first.train(checkpoint_every=2, **options) is None
        assert signal.getsignal(signal.SIGINT) is handler
        assert first.step == 3
        second = training.Trainer(config, problem, tmp_path / "parts")
        assert second.step == 3
        assert second.train(**options) is not None
        assert_same_end(whole, second)

    def test_a_loss_that_is_not_finite_ends_the_run(self, stand_in, tmp_path):
        def spoil():
            kernel = trainer.lm.logits_dense.kernel
            kernel.assign(np.full(kernel.shape, np.nan))

        trainer = stand_in([3], {3: spoil}, train_steps=5)
        with pytest.raises(FloatingPointError, match="loss=nan .* 3, ") as error:
            trainer.train(eval_every=0, eval_examples=1, checkpoint_every=2)
        message = str(error.value)
        assert "batch 2 of train with seed 0 (epoch 1, from window 8" in message
        assert "not finite is logits/kernel" in message
        assert "step-2'" in message
        assert [path.name for path in checkpoints.paths(tmp_path)] == ["step-2"]

    def test_bad_batches_are_skipped(self, stand_in, tmp_path, capsys):
        trainer = stand_in(bad_steps=(3, 4), train_steps=4)
        options = {"eval_every": 2, "eval_examples": 1, "log_every": 1}
        assert trainer.train(on_nan="skip", **options) is not None
        out = capsys.readouterr().out
        assert out.count("WARNING: skipped a step.") == 2
        assert "loss=nan in step 3, on batch 2 of train with seed 0 (epoch 1," in out
        stand_in(train_steps=5).train(**options)
        assert steps_with("learning_rate", tmp_path) == [1, 2, 3, 4, 5]
        assert steps_with("loss", tmp_path) == [1, 2, 5]
        assert steps_with("load_balancing_loss", tmp_path) == [1, 2, 5]

    def test_nothing_but_bad_batches_ends_the_run(self, stand_in, monkeypatch):
        monkeypatch.setattr("routing_tf.training.trainer.MOST_SKIPPED_IN_A_ROW", 3)
        trainer = stand_in(bad_steps=(1, 2, 4, 5, 6), train_steps=9)
        with pytest.raises(FloatingPointError, match="loss=nan .* 6, .* 3 "):
            trainer.train(eval_every=0, eval_examples=1, on_nan="skip")

    def test_evaluations_are_not_lost(self, stand_in, tmp_path):
        """Those that are not due again stay, those that are due are repeated."""
        options = {"eval_every": 0, "eval_examples": 1}
        key = "held_out_bits_per_byte"
        for steps in (2, 4):
            stand_in(train_steps=steps).train(**options)
        assert steps_with(key, tmp_path) == [0, 2, 4]
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write("{damaged}\n")
        options["eval_every"] = 2
        stand_in(train_steps=6).train(**options)
        assert steps_with(key, tmp_path) == [0, 2, 4, 6]

    def test_a_signal_ends_an_evaluation(self, stand_in, tmp_path):
        trainer = stand_in(train_steps=4)
        score = trainer.scorer.score

        def interrupted(*arguments):
            if trainer.step == 2:
                press(signal.SIGTERM)
            return score(*arguments)

        trainer.scorer.score = interrupted
        assert trainer.train(eval_every=2, eval_examples=8) is None
        assert trainer.stopped_by == signal.SIGTERM
        # Its steps are not missing in the log, whose next entry is due later.
        assert steps_with("loss", tmp_path) == [2]
        assert [path.name for path in checkpoints.paths(tmp_path)] == ["step-2"]

    def test_a_reader_that_is_gone_ends_the_run(self, stand_in, tmp_path, monkeypatch):
        trainer = stand_in(train_steps=4)
        receiver, sender = os.pipe()
        os.close(receiver)
        with open(sender, "w", closefd=False) as stdout:
            monkeypatch.setattr("sys.stdout", stdout)
            assert trainer.train(eval_every=1, eval_examples=1) is None
            with open(os.devnull, "w") as nowhere:  # for what could not be written
                os.dup2(nowhere.fileno(), sender)
        os.close(sender)
        assert trainer.stopped_by == signal.SIGPIPE
        assert [path.name for path in checkpoints.paths(tmp_path)] == ["step-1"]

    def test_what_is_due_comes_after_the_steps_of_a_call(self, stand_in, tmp_path):
        trainer = stand_in(steps_per_call=4)
        trainer.train(eval_every=5, eval_examples=1, log_every=3)
        assert trainer.step == 6
        assert steps_with("loss", tmp_path) == [4, 6]
        assert steps_with("held_out_bits_per_byte", tmp_path) == [0, 5, 6]

    def test_refused_settings(self, configure, tmp_path):
        config, problem = configure()
        parts = {n: dataclasses.replace(config, accumulation_steps=n) for n in (2, 3)}
        with pytest.raises(ValueError, match="`accumulation_steps`.*=3"):
            training.Trainer(parts[3], problem, tmp_path)
        with pytest.raises(ValueError, match="`steps_per_call`.*steps_per_call=2"):
            training.Trainer(parts[2], problem, tmp_path, steps_per_call=2)
        trainer = training.Trainer(config, problem, tmp_path)
        with pytest.raises(ValueError, match="`on_nan`.*on_nan='go on'"):
            trainer.train(on_nan="go on")
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="`model_dir`.*/file/checkpoints'"):
            training.Trainer(config, problem, tmp_path / "file")

    def test_another_run_is_refused(self, finished, configure):
        config, problem = configure(seed=7, hidden_dim=18, train_steps=50)
        with pytest.raises(ValueError, match="`model_dir`.*hidden_dim") as error:
            training.Trainer(config, problem, finished.model_dir)
        message = str(error.value)
        assert "hyperparameters.hidden_dim was 16, now 18" in message
        assert "seed was 0, now 7" in message
        assert "train_steps" not in message

    def test_workers_that_share_no_folder_are_refused(self, configure, tmp_path):
        engine, found = StandInEngine(), iter([[3.0, 0.0], [1.0, 1.0]])
        engine.gather = lambda number: np.array(next(found))
        with pytest.raises(ValueError, match=r"`model_dir`.* \[3, 0\] .*1 "):
            training.Trainer(*configure(), tmp_path, engine=engine)

    def test_changed_data_is_refused(self, finished):
        tokens = {**finished.config.num_tokens, "train": 12345}
        config = dataclasses.replace(finished.config, num_tokens=tokens)
        with pytest.raises(ValueError, match="`model_dir`.*'train' .* 12,345"):
            training.Trainer(config, finished.problem, finished.model_dir)

    def test_what_an_aborted_start_left_is_replaced(self, configure, tmp_path):
        stale = tmp_path / run_folder.PREPROCESSOR
        stale.mkdir()
        (stale / "tokenizer.json").write_text("{}")
        config, problem = configure()
        training.Trainer(config, problem, tmp_path)
        own = run_folder.load_preprocessor(tmp_path, "text")
        assert isinstance(own.tokenizer, ByteTokenizer)

    def test_the_best_checkpoint_alone_is_a_run(self, finished, configure, tmp_path):
        model_dir = tmp_path / "run"
        shutil.copytree(finished.model_dir, model_dir)
        for path in checkpoints.folder_of(model_dir).glob("step-*"):
            path.unlink()
        config, problem = configure(train_steps=20, seed=7)
        with pytest.raises(ValueError, match="`model_dir`.*seed .*0, .*7"):
            training.Trainer(config, problem, model_dir)
        trainer = training.Trainer(finished.config, finished.problem, model_dir)
        (best,) = checkpoints.paths(model_dir, "best")
        assert trainer.step == checkpoints.step_of(best)
        assert loading.load_language_model(model_dir) is not None


def nats_of(lm, inputs, targets):
    """Negative log probabilities by NumPy from the model's logits."""
    keras.Model.make_predict_function(lm, force=True)  # inputs differ in length
    logits = keras.Model.predict_on_batch(lm, inputs).astype("float64")
    logits -= logits.max(axis=-1, keepdims=True)
    log_norm = np.log(np.exp(logits).sum(axis=-1))
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_norm - chosen


class TestPairs:
    """Models with an encoder."""

    def configure(self, **changes):
        settings = models.hyperparameters.parse_overrides(runs.PAIRS_HPARAMS)
        return run_folder.configure("test_copy", tiny(**{**settings, **changes}))

    def test_scores_are_those_of_the_logits(self, tmp_path):
        config, problem = self.configure()
        lm = training.build_model(config.hyperparameters, problem)
        assert isinstance(lm, models.RoutingTransformerSeq2SeqLM)
        assert lm.preprocessor.encoder_sequence_length == 16
        assert lm.preprocessor.decoder_sequence_length == 12
        batch = problem.dataset("test", 4).as_numpy_iterator()
        nats = count = 0.0
        for inputs, targets, weights in batch:
            nats += (nats_of(lm, inputs, targets) * weights).sum()
            count += weights.sum()
        result = evaluation.evaluate(lm, problem, "test", batch_size=4)
        # Letters and end ids of all pairs, nothing that fills up
        assert result.num_tokens == count == problem.num_tokens("test") + 5
        assert result.nats == pytest.approx(nats, rel=1e-5)

    def test_an_encoder_of_embeddings_is_refused(self):
        config, problem = self.configure(encoder_inputs="embeddings")
        with pytest.raises(ValueError, match="encoder_inputs='embeddings'"):
            training.build_model(config.hyperparameters, problem)

    @pytest.mark.parametrize(
        "lengths, expected", [((16, 12), 8), ((12, 16), 8), ((200, 12), 1)]
    )
    def test_the_longer_of_two_lengths_counts(self, lengths, expected):
        _, problem = self.configure()
        problem.input_length, problem.sequence_length = lengths
        assert evaluation.batch_size_of(tiny(), problem) == expected


class TestInitCheckpoint:
    @pytest.mark.thorough
    def test_weights_alone_are_taken(self, finished, configure, tmp_path):
        preset = tmp_path / "preset"
        finished.lm.save_to_preset(str(preset))
        path = checkpoints.paths(finished.model_dir)[-1]
        file = tmp_path / "model.keras"
        finished.lm.save(file)
        sources = [finished.model_dir, path, f"{path}.index", file, preset]
        for index, source in enumerate(sources):
            config, problem = configure(init_checkpoint=str(source), seed=3)
            trainer = training.Trainer(config, problem, tmp_path / f"run{index}")
            assert trainer.step == int(trainer.lm.optimizer.iterations) == 0
            assert_same_weights(trainer.lm, finished.lm)

    def test_other_shapes_are_listed(self, finished, configure, tmp_path):
        source = str(finished.model_dir)
        config, problem = configure(init_checkpoint=source, intermediate_dim=24)
        with pytest.raises(ValueError, match="Received: 3 .*feed_forward") as error:
            training.Trainer(config, problem, tmp_path)
        message = str(error.value)
        kernel = "block_0/feed_forward/input/kernel has the shape (16, 16) there, "
        assert kernel + "(16, 24) here" in message
        assert not (tmp_path / "run.json").exists()


class TestEvaluate:
    def test_equals_a_mean_over_all_tokens(self, finished):
        problem = finished.problem
        # One batch that fits exactly, so that nothing is filled up.
        dataset = problem.dataset("test", problem.num_windows("test"))
        inputs, targets, weights = next(dataset.as_numpy_iterator())
        total = (nats_of(finished.lm, inputs, targets) * weights).sum()
        count = weights.sum()
        optimizer = finished.lm.optimizer
        result = evaluation.evaluate(finished.lm, problem, "test", batch_size=5)
        assert finished.lm.optimizer is optimizer
        assert result.num_tokens == count == problem.num_tokens("test")
        assert result.nats == pytest.approx(total, rel=1e-5)
        assert result.nats_per_token == pytest.approx(total / count, rel=1e-5)
        assert result.bits == pytest.approx(total / count / np.log(2), rel=1e-5)

    def test_report_tells_the_figures_apart(self, finished):
        problem, result = finished.problem, finished.result
        for scope, said in (
            ("full", 'scope "full": WARNING: later tokens'),
            ("prefix", 'scope "prefix": every token only from those'),
        ):
            scored = dataclasses.replace(result, routing_scope=scope, influence=0.0)
            text = "\n".join(evaluation.report(problem, "validation", scored, tiny()))
            assert f"{result.bits:.4f} bits per byte" in text
            assert said in text
        sound = tiny(routing="token_choice")
        for influence, said in (
            (1e-6, "strictly causal"),
            (0.5, "WARNING: other later tokens moved"),
            (np.nan, "WARNING: other later tokens moved"),
            (None, "was not tried"),
        ):
            scored = dataclasses.replace(result, influence=influence)
            *_, line = evaluation.report(problem, "validation", scored, sound)
            assert said in line
            assert ("strictly" in line) == (influence == 1e-6)


class TestWeightDecay:
    def test_one_step_decays_all_but_biases(self, configure):
        _, problem = configure()
        own = {"routing": "long_short", "routed_key_shift": 0}
        h = tiny(weight_decay=0.5, commitment_weight=0.0, **own)
        lm = training.build_model(h, problem)
        start = {}
        for variable in lm.trainable_variables:
            variable.assign(np.random.default_rng(0).normal(size=variable.shape))
            start[variable.path] = np.asarray(variable)
        training.compile_for_training(lm, h)
        # Plain gradient descent on tokens without weight: the decay is all there is.
        lm.optimizer = keras.optimizers.SGD(0.1)
        lm.optimizer.build(lm.trainable_variables)
        inputs, targets, weights = next(problem.dataset("train", 2).as_numpy_iterator())
        loss = keras.Model.train_on_batch(lm, inputs, targets, 0 * weights)[0]
        expected = 0.0
        for variable in lm.trainable_variables:
            value = start[variable.path]
            if not variable.path.endswith(("bias", "beta")):
                expected += 0.5 * np.square(value).sum() / 2
                value = value - 0.1 * 0.5 * value
            np.testing.assert_allclose(variable, value, atol=1e-5)
        names = {path.rpartition("/")[2] for path in start}
        assert names >= {"bias", "beta", "gamma", "kernel"}
        assert loss == pytest.approx(expected, rel=1e-5)

    def test_none(self, configure):
        _, problem = configure()
        lm = training.build_model(tiny(), problem)
        training.add_weight_decay(lm, 0.5)
        training.add_weight_decay(lm, 0.0)
        assert all(v.regularizer is None for v in lm.trainable_variables)


COSINE = {"gradient_clip_norm": 2.0, "warmup_steps": 5, "adam_beta_2": 0.9}
COSINE_RATES = {2: 0.008, 5: 0.02, 30: 0.01 * (1 + 0.5**0.5), 55: 0.01}
COSINE_RATES |= {105: 0.0, 999: 0.0}
RELEASE = models.preset_hyperparameters("enwik8_local_cluster8k")
NOAM = {"learning_rate_schedule": "noam", "learning_rate": 0.2, "warmup_steps": 8}


class TestOptimizer:
    @pytest.mark.parametrize(
        "h, train_steps, rates",
        [
            (RELEASE, None, {0: 0.01, 40000: 0.005}),
            (tiny(**COSINE), 105, COSINE_RATES),
            # A run may end within the warm-up.
            (tiny(warmup_steps=100), 10, {10: 0.02 / 10}),
            (tiny(**NOAM), None, {7: 5000 * 0.2 * 0.002 * 16**-0.5 * 8**-0.5}),
        ],
        ids=["release", "cosine", "warm-up", "noam"],
    )
    def test_rates(self, h, train_steps, rates):
        schedule = training.make_schedule(h, train_steps)
        for step, rate in rates.items():
            assert float(schedule(step)) == pytest.approx(rate, rel=1e-6, abs=1e-9)

    def test_settings(self):
        optimizer = training.make_optimizer(RELEASE)
        assert isinstance(optimizer, optimizers.Adafactor)
        assert optimizer.global_clipnorm is None
        h = tiny(**COSINE)
        optimizer = training.make_optimizer(h)
        assert optimizer.global_clipnorm == 2.0
        for name in ("beta_1", "beta_2", "epsilon"):
            assert optimizer.get_config()[name] == getattr(h, f"adam_{name}")

    def test_of_ones_own(self, monkeypatch):
        monkeypatch.setattr(optimizers, "OPTIMIZERS", dict(optimizers.OPTIMIZERS))

        def make(h, schedule, clip):
            return keras.optimizers.SGD(schedule, global_clipnorm=clip)

        with pytest.raises(ValueError, match="`name`.*name='adam'"):
            optimizers.register("adam", make)
        optimizers.register("sgd", make)
        made = training.make_optimizer(tiny(optimizer="sgd"))
        assert isinstance(made, keras.optimizers.SGD)
        with pytest.raises(ValueError, match="make=None"):
            optimizers.register("sgd", None)
        optimizers.register("sgd", lambda *_: "sgd")
        with pytest.raises(ValueError, match="optimizer='sgd', which returns 'sgd'"):
            training.make_optimizer(tiny(optimizer="sgd"))


class TestRunConfig:
    def test_survives_the_file(self, configure, tmp_path):
        config, problem = configure(seed=5)
        assert config.hyperparameters.vocabulary_size == problem.vocabulary_size == 258
        splits = ("train", "validation")
        assert config.num_tokens == {x: problem.num_tokens(x) for x in splits}
        config.save(tmp_path)
        assert run_folder.RunConfig.load(tmp_path) == config
        config.check_continues(run_folder.RunConfig.load(tmp_path), tmp_path)
        assert run_folder.RunConfig.load(tmp_path / "nowhere") is None

    @pytest.mark.parametrize("text", ["{", "{}", '{"hyperparameters": {"a": 1}}'])
    def test_damaged_file(self, tmp_path, text):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match="`model_dir`.*/run.json'"):
            run_folder.RunConfig.load(tmp_path)

    def test_windows_longer_than_the_model(self, text_file):
        options = {"files": text_file, "sequence_length": LENGTH + 1}
        h = tiny(truncate_length=9)
        with pytest.raises(ValueError, match="`sequence_length`.* 33 .*9"):
            run_folder.configure("text_files", h, problem_options=options)
        assert problems.get_class("text_files").options_for(h)["sequence_length"] == 9

    def test_shorter_windows(self, text_file):
        options = {"files": text_file, "sequence_length": "16"}
        config, problem = run_folder.configure(
            "text_files", tiny(), problem_options=options
        )
        assert problem.sequence_length == 16
        assert evaluation.batch_size_of(config.hyperparameters, problem) == 8


def test_occupancy_of_known_counts(configure):
    _, problem = configure()
    lm = training.build_model(tiny(num_routed_heads=2, hidden_dim=18), problem)
    (counts,) = [v for v in lm.weights if v.path.endswith("kmeans/counts")]
    counts.assign([[2.0, 2.0, 2.0], [0.0, 0.0, 5.0]])
    tag = "occupancy/block_0/attention/routed_heads"
    expected = {
        f"{tag}/min": 0.0,
        f"{tag}/max": 1.0,
        f"{tag}/entropy": 0.5,
        f"{tag}/dead": 2 / 6,
    }
    assert training.centroid_occupancy(lm) == pytest.approx(expected)


def test_no_tokenizer_no_preprocessor(configure):
    class Digits(problems.Problem):
        vocabulary_size = 10

    lm = training.build_model(tiny(vocabulary_size=10), Digits())
    assert lm.preprocessor is None


class TestReleaseCheckpoint:
    name = "pg19_local_cluster8k"
    prefix = golden_cases.FOLDER / "checkpoints" / name / "model.ckpt-1234"

    def settings(self, **changes):
        hparams = golden_cases.load(f"models/{self.name}.npz").config["hparams"]
        settings = conversion.hyperparameters_from_release(hparams, vocabulary_size=50)
        return settings.replace(**changes)

    def test_gives_a_run_its_first_weights(self):
        backbone = models.RoutingTransformer(self.settings())
        lm = models.RoutingTransformerCausalLM(backbone)
        loading.initialize(lm, str(self.prefix))
        start = golden_cases.load(f"models/{self.name}.npz").group("var")
        for name, value in models.release.read_variables(lm).items():
            np.testing.assert_array_equal(value, start[name], err_msg=name)

    def test_what_its_weights_rely_on_stays(self, configure):
        config, _ = configure(init_checkpoint=f"{self.prefix}.index")
        assert config.hyperparameters.compatibility == "trained"

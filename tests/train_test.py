import functools
import re

import keras
import numpy as np
import pytest

from routing_tf import problems
from routing_tf import training
from routing_tf.cli import train
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.training import checkpoints
from routing_tf.training import loading
from routing_tf.training import run_folder
from tests import command_line
from tests import runs
from tests import small_problems

pytestmark = pytest.mark.usefixtures("eager")

parse = functools.partial(command_line.parse, train)
HPARAMS = f"{runs.HPARAMS},num_routed_heads=0"


@pytest.fixture(scope="module")
def arguments(text):
    return [f"--files={text}", "--hparams_set=byte_tiny", f"--hparams={HPARAMS}"]


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    """The folder of a finished run."""
    model_dir = tmp_path_factory.mktemp("run")
    options = ["--train_steps=4", "--eval_examples=4", "--sample_bytes=0", "--seed=3"]
    assert train.run(parse(f"--model_dir={model_dir}", *arguments, *options)) == 0
    return model_dir


@pytest.fixture
def run(works):
    return functools.partial(works, train)


def configure(*arguments):
    return train.configure(parse(*arguments))[0]


def test_defaults(tmp_path):
    config, problem = train.configure(parse(f"--model_dir={tmp_path}"))
    assert config.problem == problem.name == "python_source"
    assert config.hparams_set == "python_small"
    assert config.seed == 0
    assert problem.sequence_length == config.hyperparameters.max_sequence_length
    assert config.hyperparameters.vocabulary_size == problem.vocabulary_size


@pytest.mark.thorough
def test_both_scopes_of_expert_choice(arguments, tmp_path, run):
    heads = HPARAMS.replace("num_routed_heads=0", "num_routed_heads=1")
    hparams = f"--hparams={heads},routing=expert_choice,coordinate_embeddings=true"
    options = ["--train_steps=1", "--eval_examples=3", "--sample_bytes=99"]
    out = run(f"--model_dir={tmp_path}", *arguments, hparams, *options)
    full = out.index('routing scope "full": WARNING: later tokens take part')
    prefix = out.index('routing scope "prefix": every token only from those before')
    assert full < prefix
    assert out.count("validation: 96 tokens scored") == 2
    bits = runs.metrics(tmp_path)[-1]["held_out_bits_per_byte"]
    assert out.splitlines()[-1] == f"held-out bits per byte: {bits:.4f}"


def test_a_run_on_images(tmp_path, run):
    hparams = f"--hparams={runs.IMAGE_HPARAMS},num_routed_heads=0"
    options = ["--problem=test_checkers", hparams, "--sample_images=3"]
    options += ["--train_steps=2", "--eval_examples=4"]
    out = run(f"--model_dir={tmp_path}", *options)
    assert "images: train 6" in out
    assert "model: digits_small" in out
    bits = problems.get("test_checkers").histogram_bits("validation")
    assert f"to beat: {bits:.4f} bits per dimension" in out
    for name, rows, columns in (("samples", 1, 3), ("completions", 2, 2)):
        path = tmp_path / f"{name}.png"
        assert f"{name}: {path}" in out
        # Lines of one pixel stand between the images.
        picture = keras.utils.img_to_array(keras.utils.load_img(path))
        assert picture.shape == (8 * (5 * rows - 1), 8 * (5 * columns - 1), 3)
    bits = runs.metrics(tmp_path)[-1]["held_out_bits_per_dimension"]
    assert out.splitlines()[-1] == f"held-out bits per dimension: {bits:.4f}"


@pytest.mark.thorough
def test_a_run_on_images_of_ones_own(tmp_path, run, refused):
    """Their size, channels and classes need no settings."""
    for number in range(8):
        name = f"{('train', 'validation')[number % 2]}/{'ab'[number // 4]}"
        path = tmp_path / "own" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(path, np.full((3, 5, 3), 20 * number), scale=False)
    tiny = "num_layers=1,hidden_dim=16,intermediate_dim=16,batch_tokens=90,"
    tiny += "num_local_heads=1,num_routed_heads=0"
    options = ["--problem=image_folder", f"--problem_option=folder={tmp_path}/own"]
    options += ["--sample_images=0", "--eval_examples=2"]
    model_dir = f"--model_dir={tmp_path / 'run'}"
    out = run(model_dir, *options, f"--hparams={tiny}", "--train_steps=2")
    assert "images: train 4, validation 4; 3 x 5 x 3" in out
    assert "model: images_small" in out
    h = run_folder.RunConfig.load(tmp_path / "run").hyperparameters
    assert (h.image_height, h.image_width, h.num_channels) == (3, 5, 3)
    assert (h.num_classes, h.vocabulary_size) == (2, 256)
    # A run that was begun goes on.
    assert configure(model_dir, "--train_steps=3").hyperparameters.num_classes == 2
    model_dir = f"--model_dir={tmp_path / 'other'}"
    said = refused(train, model_dir, *options, f"--hparams={tiny},num_classes=3")
    assert "num_classes=2. Received: num_classes=3 in --hparams" in said
    config = configure(model_dir, *options[:2], f"--hparams={tiny},num_classes=none")
    assert config.hyperparameters.num_classes is None


WORDS = [
    "--problem=test_words",
    f"--hparams={HPARAMS}",
    "--eval_examples=4",
    "--sample_bytes=0",
]


def test_splits_of_a_run(tmp_path, run, refused, monkeypatch):
    monkeypatch.setattr(small_problems.Words, "missing", {"train"})
    model_dir = f"--model_dir={tmp_path}"
    said = refused(train, model_dir, *WORDS)
    assert said == "The files of 'train' are missing"
    splits = ["--train_split=validation", "--eval_split=test"]
    out = run(model_dir, *WORDS, *splits, "--train_steps=3")
    assert "data: test_words: validation 1,000 ids, test 300 ids" in out
    # 31 windows of 32 ids in an epoch
    assert "3 steps of 128 tokens of validation, 0.387 epochs" in out
    assert "\ntest: 128 tokens scored" in out
    config = run_folder.RunConfig.load(tmp_path)
    assert config.problem_options == {"train_split": "validation", "eval_split": "test"}
    assert config.num_tokens == {"validation": 1000, "test": 300}
    # The split that the run has may be named once more.
    again = ["--train_steps=4", *WORDS[2:], "--eval_split=test"]
    out = run(model_dir, *again)
    assert "continuing at step 3" in out
    assert "\ntest: 128 tokens scored" in out
    said = refused(train, model_dir, "--train_steps=4", "--eval_split=validation")
    assert "problem_options.eval_split was 'test', now 'validation'" in said
    said = refused(train, model_dir, "--train_steps=4", "--hparams=train_steps=5")
    assert "`--train_steps` and `--hparams` must agree" in said


def test_the_metric_is_that_of_the_problem(tmp_path, run):
    out = run(f"--model_dir={tmp_path}", *WORDS, "--train_steps=2")
    name = "perplexity per word"
    key = "held_out_perplexity_per_word"
    held_out = [entry[key] for entry in runs.metrics(tmp_path, key)]
    (nats,) = re.findall(r"validation: 128 tokens scored, (.*) nats", out)
    assert held_out[-1] == pytest.approx(np.exp(5 * float(nats)), rel=1e-3)
    lines = out.splitlines()
    assert lines[-1] == f"held-out {name}: {held_out[-1]:.4f}"
    assert f"step 0: held-out {name} {held_out[0]:.4f}" in lines
    assert f"nats per token, {held_out[-1]:.4f} {name}" in out
    (logged,) = runs.metrics(tmp_path, "loss")
    assert logged["perplexity_per_word"] == pytest.approx(np.exp(5 * logged["loss"]))
    last = f"{logged['loss']:.4f}, {logged['perplexity_per_word']:.4f} {name}"
    (progress,) = [line for line in lines if line.startswith("step 2/2: ")]
    # The line is about both steps, as the entry is.
    assert progress.startswith(f"step 2/2: loss {last}")
    assert "bits" not in (tmp_path / "metrics.jsonl").read_text()


PAIRS_HPARAMS = f"{HPARAMS},{runs.PAIRS_HPARAMS}"
SIZES = {"input_length": 16, "sequence_length": 12}
PAIRS = ["--problem=test_copy", "--hparams_set=byte_tiny", "--eval_examples=4"]


@pytest.mark.thorough
def test_a_run_on_pairs_of_texts(tmp_path, run):
    model_dir = f"--model_dir={tmp_path}"
    options = [f"--hparams={PAIRS_HPARAMS}", "--train_steps=1", "--sample_bytes=2"]
    out = run(model_dir, *PAIRS, *options)
    assert "data: test_copy: train 216 ids, validation 33 ids" in out
    assert "of them trainable, 1 + 1 layers" in out
    # The longer length decides.
    assert "1 steps of 8 pairs of 16 and 12 tokens of train, 0.2 epochs" in out
    (source,) = problems.get("test_copy", **SIZES).pair("validation", 0)[:1]
    text = ByteTokenizer().detokenize(source[:2])
    lines = out.splitlines()
    place = lines.index("--- held-out source")
    shown = [text, "--- its target", text, "--- sampled target"]
    assert lines[place + 1 : place + 5] == shown
    value = runs.metrics(tmp_path)[-1]["held_out_perplexity_per_token"]
    assert lines[-1] == f"held-out perplexity per token: {value:.4f}"
    config = run_folder.RunConfig.load(tmp_path)
    assert config.hyperparameters.vocabulary_size == 258
    assert config.problem_options == {}
    lm = loading.load_language_model(tmp_path)
    assert lm.preprocessor.encoder_sequence_length == SIZES["input_length"]
    assert lm.preprocessor.decoder_sequence_length == SIZES["sequence_length"]


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("encoder", ["--problem=test_copy", f"--hparams={HPARAMS}"]),
        ("encoder", ["--problem=test_words", f"--hparams={PAIRS_HPARAMS}"]),
        ("digits_small", ["--problem=digits", "--hparams_set=python_small"]),
        ("of texts without an encoder", ["--hparams_set=digits_small"]),
    ],
)
def test_a_model_of_another_kind_is_refused(message, arguments, tmp_path, refused):
    arguments = ["--hparams_set=byte_tiny", *arguments]
    assert message in refused(train, f"--model_dir={tmp_path / 'new'}", *arguments)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "steps, more",
    [
        ([], ""),
        pytest.param(["--train_steps=3"], ", beyond 3", marks=pytest.mark.thorough),
    ],
)
def test_a_finished_run_is_evaluated_again(steps, more, finished, run):
    settings = (finished / "run.json").read_text()
    options = ["--eval_examples=3", "--sample_bytes=0", *steps]
    assert "chosen anew" not in (out := run(f"--model_dir={finished}", *options))
    assert f"already at step 4{more}: nothing left to train" in out
    assert ("training: " in out) == (not steps)
    entries = runs.metrics(finished)
    assert [entry["step"] for entry in entries] == [0, 4, 4]
    bits = entries[-1]["held_out_bits_per_byte"]
    assert out.endswith(f"\nheld-out bits per byte: {bits:.4f}\n")
    assert (finished / "run.json").read_text() == settings


def test_flags_left_out_are_those_of_the_run(finished, arguments):
    model_dir = f"--model_dir={finished}"
    config = configure(model_dir)
    assert config == run_folder.RunConfig.load(finished)
    assert config == configure(model_dir, *arguments, "--train_steps=4", "--seed=3")
    assert configure(model_dir, "--train_steps=9").hyperparameters.train_steps == 9


def test_one_training_in_a_folder(finished, refused):
    with run_folder.hold(finished):
        said = refused(train, f"--model_dir={finished}", "--train_steps=9")
    assert "another process trains there" in said


def test_initial_weights_have_a_whole_path(finished, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(finished.parent)
    options = [f"--model_dir={tmp_path}", *arguments]
    config = configure(*options, f"--init_checkpoint={finished.name}")
    assert config.init_checkpoint == str(finished)
    config.save(tmp_path)
    assert configure(*options).init_checkpoint == str(finished)


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--tpu=x --strategy=mirrored", "`--tpu` needs the strategy 'tpu'"),
        ("--hparams=vocabulary_size=300", "that of the problem"),
        ("--problem_option=length=3", "sequence_length"),
    ],
)
def test_mistakes_are_one_line_on_stderr(
    argument, message, tmp_path, arguments, refused
):
    model_dir = f"--model_dir={tmp_path / 'new'}"
    assert message in refused(train, model_dir, *arguments, *argument.split())
    assert not (tmp_path / "new" / "run.json").exists()


def test_stray_arguments_are_refused(tmp_path, run_command):
    argv = ["train", "model_dir=x"]
    _, _, err = run_command(train, f"--model_dir={tmp_path}", argv=argv)
    assert "['model_dir=x']" in err


@pytest.mark.thorough
def test_how_a_run_computes_is_remembered(arguments, run, refused, tmp_path):
    model_dir = f"--model_dir={tmp_path}"
    common = [model_dir, *arguments, "--sample_bytes=0", "--eval_examples=2"]
    scale = ["--precision=bfloat16", "--accumulation_steps=2", "--remat"]
    out = run(*common, *scale, "--train_steps=1")
    assert "one device" in out and "bfloat16" in out
    out = run(model_dir, "--train_steps=2", "--sample_bytes=0", "--eval_examples=3")
    assert "continuing at step 1" in out and "bfloat16" in out
    assert "anew: 96 held-out tokens are scored now, 64 before" in out
    config = run_folder.RunConfig.load(tmp_path)
    assert config.accumulation_steps == 2
    assert config.hyperparameters.remat
    lm = loading.load_language_model(tmp_path)
    assert lm.backbone.dtype_policy.name == "mixed_bfloat16"
    assert {weight.dtype for weight in lm.weights} == {"float32"}
    said = refused(train, model_dir, "--precision=float32")
    assert "precision was 'bfloat16', now 'float32'" in said


@pytest.mark.thorough
def test_another_backend(arguments, tmp_path):
    other = {"tensorflow": "jax", "jax": "tensorflow"}[keras.backend.backend()]
    command = ["-m", "routing_tf.train", f"--backend={other}"]
    command += [f"--model_dir={tmp_path}", *arguments, "--train_steps=1"]
    result = command_line.python(*command, "--eval_examples=2", "--sample_bytes=0")
    assert result.returncode == 0, result.stderr
    assert f"{other} backend" in result.stdout
    # Checkpoints are those of either backend.
    assert loading.load_language_model(tmp_path).count_params()


@pytest.mark.thorough
def test_ctrl_c_leaves_a_checkpoint(run_command, tmp_path, monkeypatch):
    read = small_problems.Words.dataset

    def interrupted(self, *arguments, **options):
        dataset = read(self, *arguments, **options)
        return small_problems.interrupted(dataset, *arguments)

    monkeypatch.setattr(small_problems.Words, "dataset", interrupted)
    arguments = [f"--model_dir={tmp_path}", *WORDS, "--train_steps=9"]
    code, out, err = run_command(train, *arguments)
    assert code == 130, err
    # What the folder does not keep stands in the command that continues.
    assert out.endswith(f"--model_dir={tmp_path} {' '.join(WORDS[-2:])}\n")
    (path,) = checkpoints.paths(tmp_path)
    assert checkpoints.step_of(path) == 3
    config, problem = train.configure(parse(f"--model_dir={tmp_path}"))
    assert training.Trainer(config, problem, tmp_path).step == 3

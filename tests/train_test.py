import json
import os
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
from absl import flags

from routing_tf import commands
from routing_tf import problems
from routing_tf import run_directory
from routing_tf import train
from routing_tf import training

HPARAMS = (
    "num_layers=1,hidden_dim=16,intermediate_dim=16,num_local_heads=1,"
    "num_routed_heads=1,attention_window=8,local_block_length=8,"
    "local_relative_positions=false,routed_relative_positions=false,"
    "max_sequence_length=32,batch_tokens=128,warmup_steps=2"
)


def parse(*arguments):
    values = flags.FlagValues()
    train.define_flags(values)
    values(["train", *arguments])
    return values


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 101, 9000, "uint8")))
    return str(path)


@pytest.fixture(scope="module")
def arguments(text_file):
    return [f"--files={text_file}", "--hparams_set=byte_tiny", f"--hparams={HPARAMS}"]


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    """The folder of a finished run."""
    model_dir = tmp_path_factory.mktemp("run")
    options = ["--train_steps=4", "--eval_examples=4"]
    options += ["--sample_bytes=0", "--seed=3"]
    assert train.run(parse(f"--model_dir={model_dir}", *arguments, *options)) == 0
    return model_dir


@pytest.fixture
def run(capsys):
    """Runs the command in this process: exit code, standard output and error."""

    def run_command(*arguments, argv=("train",)):
        code = commands.command(train.run, parse(*arguments), argv)
        return code, *capsys.readouterr()

    return run_command


def configure(*arguments):
    return train.configure(parse(*arguments))[0]


def test_defaults(tmp_path):
    config, problem = train.configure(parse(f"--model_dir={tmp_path}"))
    assert config.problem == problem.name == "python_source"
    assert config.hparams_set == "python_small"
    assert config.seed == 0
    assert problem.sequence_length == config.hyperparameters.max_sequence_length
    assert config.hyperparameters.vocabulary_size == problem.vocabulary_size


def test_a_run_from_start_to_end(arguments, tmp_path, run):
    options = ["--train_steps=3", "--eval_examples=4"]
    code, out, err = run(
        f"--model_dir={tmp_path}", *arguments, *options, "--sample_bytes=6"
    )
    assert code == 0
    assert "error" not in err
    assert "data: text_files: train 8,100 bytes" in out
    assert "parameters" in out
    assert "training: 3 steps of 128 tokens" in out
    before, after = (f"step {step}: held-out bits per byte" for step in (0, 3))
    assert out.index(before) < out.index("step 1/3: loss") < out.index(after)
    assert 'routing scope "full": no head looks at later tokens' in out
    assert "WARNING" not in out
    assert "--- sampled continuation" in out
    last = out.splitlines()[-1]
    entries = (tmp_path / "metrics.jsonl").read_text().splitlines()
    bits = json.loads(entries[-1])["held_out_bits_per_byte"]
    assert last == f"held-out bits per byte: {bits:.4f}"


def test_both_scopes_of_expert_choice(arguments, tmp_path, run):
    hparams = f"--hparams={HPARAMS},routing=expert_choice"
    options = ["--train_steps=2", "--eval_examples=3", "--sample_bytes=4"]
    code, out, _ = run(f"--model_dir={tmp_path}", *arguments, hparams, *options)
    assert code == 0
    full = out.index('routing scope "full": WARNING: later tokens take part')
    prefix = out.index('routing scope "prefix": every token from those before it')
    assert full < prefix
    assert out.count("validation: 96 tokens scored") == 2
    entries = (tmp_path / "metrics.jsonl").read_text().splitlines()
    bits = json.loads(entries[-1])["held_out_bits_per_byte"]
    assert out.splitlines()[-1] == f"held-out bits per byte: {bits:.4f}"


IMAGE_HPARAMS = (
    "num_layers=1,hidden_dim=16,intermediate_dim=16,num_local_heads=1,"
    "num_routed_heads=1,batch_tokens=256"
)


@pytest.mark.parametrize("classes", ["", ",num_classes=none"])
def test_a_run_on_images(classes, tmp_path, run):
    options = ["--problem=digits", f"--hparams={IMAGE_HPARAMS}{classes}"]
    options += ["--train_steps=2", "--eval_examples=4"]
    code, out, err = run(f"--model_dir={tmp_path}", *options, "--sample_images=3")
    assert code == 0
    assert "error" not in err
    assert "images: train 1,437" in out
    assert "model: digits_small" in out
    bits = problems.get("digits").histogram_bits("validation")
    assert f"to beat: {bits:.4f} bits per dimension" in out
    for name, height in (("samples", 8), ("completions", 17)):
        path = tmp_path / f"{name}.png"
        assert f"{name}: {path}" in out
        width = {"samples": 3 * 9 - 1, "completions": 2 * 9 - 1}[name]
        assert keras.utils.img_to_array(keras.utils.load_img(path)).shape == (
            8 * height,
            8 * width,
            3,
        )
    entries = (tmp_path / "metrics.jsonl").read_text().splitlines()
    bits = json.loads(entries[-1])["held_out_bits_per_dimension"]
    assert out.splitlines()[-1] == f"held-out bits per dimension: {bits:.4f}"


def test_models_and_problems_must_fit(tmp_path, run):
    code, _, err = run(
        f"--model_dir={tmp_path}", "--problem=digits", "--hparams_set=python_small"
    )
    assert code == 1
    assert "sequence_length=2048" in err and "digits_small" in err
    code, _, err = run(f"--model_dir={tmp_path}", "--hparams_set=digits_small")
    assert code == 1
    assert "needs a model of texts without an encoder" in err
    assert "kind 'image'" in err


def test_a_finished_run_is_evaluated_again(finished, run):
    settings = (finished / "run.json").read_text()
    options = ["--eval_examples=4", "--sample_bytes=0"]
    code, out, _ = run(f"--model_dir={finished}", *options)
    assert code == 0
    assert "at step 4 already: nothing left to train" in out
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["step"] for entry in entries] == [0, 4, 4]
    bits = entries[-1]["held_out_bits_per_byte"]
    assert out.endswith(f"\nheld-out bits per byte: {bits:.4f}\n")
    assert (finished / "run.json").read_text() == settings


def test_flags_left_out_are_those_of_the_run(finished, arguments):
    model_dir = f"--model_dir={finished}"
    config = configure(model_dir)
    assert config == run_directory.RunConfig.load(finished)
    assert config == configure(model_dir, *arguments, "--train_steps=4", "--seed=3")
    assert configure(model_dir, "--train_steps=9").hyperparameters.train_steps == 9


def test_other_settings_are_refused(finished, run):
    code, out, err = run(
        f"--model_dir={finished}", "--hparams=hidden_dim=18", "--seed=4"
    )
    assert code == 1
    assert "hyperparameters.hidden_dim was 16, now 18" in err
    assert "seed was 3, now 4" in err
    assert "Use another model_dir" in err


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--hparams=hidden=3", "hidden_dim"),
        ("--hparams=hidden_dim=wide", "hidden_dim='wide'"),
        ("--hparams=vocabulary_size=300", "that of the problem"),
        ("--hparams_set=small", "python_small"),
        ("--problem=enwik", "python_source"),
        ("--problem_option=length", "must be name=value. Received: 'length'"),
        ("--problem_option=length=3", "sequence_length"),
        ("--files=nowhere/*.txt", "must name existing files"),
        ("--init_checkpoint=nowhere", "a preset directory"),
    ],
)
def test_mistakes_are_one_line_on_stderr(argument, message, tmp_path, arguments, run):
    options = [] if argument.startswith("--problem=") else arguments
    code, out, err = run(f"--model_dir={tmp_path / 'new'}", *options, argument)
    assert code == 1
    assert "error: " in err
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "new" / "run.json").exists()


def test_unreadable_data(tmp_path, arguments, run):
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    code, _, err = run(
        f"--model_dir={tmp_path / 'run'}", *arguments, f"--files={tmp_path}/*.txt"
    )
    assert code == 1
    assert "link.txt" in err


def test_stray_arguments_are_refused(tmp_path, run):
    code, _, err = run(f"--model_dir={tmp_path}", argv=["train", "model_dir=x"])
    assert code == 1
    assert "['model_dir=x']" in err


def test_unknown_flag():
    with pytest.raises(flags.UnrecognizedFlagError, match="modeldir"):
        parse("--modeldir=x")


def test_model_dir_is_required():
    with pytest.raises(flags.IllegalFlagValueError, match="model_dir"):
        parse()


def test_files_are_absolute(tmp_path, text_file, monkeypatch):
    folder, name = os.path.split(text_file)
    monkeypatch.chdir(folder)
    config = configure(
        f"--model_dir={tmp_path}",
        "--hparams_set=byte_tiny",
        f"--files={name}",
        "--problem_option=sequence_length=16",
    )
    assert config.problem == "text_files"
    assert config.problem_options == {"files": text_file, "sequence_length": "16"}


def test_control_characters_are_not_printed():
    assert train.printable("a\x1b[2J\té\n") == "a\ufffd[2J\té\n"


def test_ctrl_c_leaves_a_checkpoint(arguments, tmp_path):
    command = [sys.executable, "-m", "routing_tf.train", f"--model_dir={tmp_path}"]
    command += [*arguments, "--train_steps=1000000", "--eval_examples=2"]
    with subprocess.Popen(
        command,
        cwd=pathlib.Path(train.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for line in process.stdout:
                if line.startswith("step 1/"):
                    break
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "stopping after this step" in err
    assert f"--model_dir={tmp_path}" in out.splitlines()[-1]
    assert "Traceback" not in err
    (path,) = run_directory.checkpoints(tmp_path)
    step = run_directory.step_of(path)
    assert step >= 1
    config, problem = train.configure(parse(f"--model_dir={tmp_path}"))
    assert training.Trainer(config, problem, tmp_path).step == step

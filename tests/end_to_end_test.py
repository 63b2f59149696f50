"""One run from its training to its texts, by the commands, on every backend."""

import pytest

from routing_tf.cli import analyse
from routing_tf.cli import evaluate
from routing_tf.cli import generate
from routing_tf.cli import train
from routing_tf.training import loading
from tests import runs

pytestmark = pytest.mark.usefixtures("eager")
HPARAMS = f"{runs.HPARAMS},num_routed_heads=1"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "new"


@pytest.fixture
def run(model_dir, run_command):
    """Runs a command on the run: what it said."""

    def run(command, *arguments):
        code, out, err = run_command(command, f"--model_dir={model_dir}", *arguments)
        assert not code, err
        assert "error" not in err
        return out

    return run


def test_training(run, model_dir, text):
    arguments = [f"--files={text}", "--hparams_set=byte_tiny", f"--hparams={HPARAMS}"]
    arguments += ["--train_steps=3", "--eval_examples=3", "--sample_bytes=6"]
    out = run(train, *arguments)
    assert "data: text_files: train 3,600 bytes" in out
    assert "parameters" in out
    assert "training: 3 steps of 128 tokens of train, 0.107 epochs" in out
    before, after = (f"step {step}: held-out bits per byte" for step in (0, 3))
    assert out.index(before) < out.index("step 1/3: loss") < out.index(after)
    assert "strictly causal: no later token influences a score" in out
    assert "WARNING" not in out
    assert "--- sampled continuation" in out
    bits = runs.metrics(model_dir)[-1]["held_out_bits_per_byte"]
    assert out.splitlines()[-1] == f"held-out bits per byte: {bits:.4f}"


def test_evaluation(run, model_dir):
    out = run(evaluate, "--split=validation", "--eval_examples=3")
    bits = runs.metrics(model_dir)[-1]["held_out_bits_per_byte"]
    assert "validation: 96 tokens scored" in out
    assert out.splitlines()[-1] == f"held-out bits per byte: {bits:.4f}"


def test_generation(run, model_dir):
    options = ["--prompt=abc", "--max_length=12", "--sampler=greedy", "--nostop_at_end"]
    out = run(generate, *options)
    lm = loading.load_language_model(model_dir)
    lm.compile(sampler="greedy")
    expected = lm.generate("abc", max_length=12, stop_token_ids=None)
    assert out == f"{expected}\n"


def test_analysis(run):
    options = ["--num_windows=2", "--num_perturbations=2", "--eval_examples=2"]
    out = run(analyse, "--what=causality", *options)
    assert out.splitlines()[-1] == "no earlier output moved: strictly causal"

import inspect
import sys

import pytest

from routing_tf import optimizers
from routing_tf import problems
from routing_tf import zoo
from routing_tf.cli import convert
from routing_tf.cli import datagen
from routing_tf.cli import evaluate
from routing_tf.cli import export
from routing_tf.cli import first_checks
from routing_tf.cli import train
from routing_tf.settings import registries
from tests.command_line import parse
from tests.command_line import python

SLOW = {"jax", "keras", "numpy", "tensorflow", "tensorflow_datasets"}


def alone(folder, command, *arguments):
    """Runs a command in a process of its own; returns it and what it has imported."""
    module = ("-X", "importtime", "-m", f"routing_tf.{command}")
    done = python(*module, *arguments, folder=folder)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "absl.flags" in imported
    return done, imported


def test_names_are_those_that_files_register():
    # Tests register others.
    there = [n for n in problems.names() if not n.startswith(("test_", "count_"))]
    assert list(registries.problems()) == there
    for name, line in registries.problems().items():
        assert line == inspect.getdoc(problems.get_class(name)).splitlines()[0]
    for registry, there in (
        ("PATTERNS", zoo.PATTERNS),
        ("FEED_FORWARDS", zoo.FEED_FORWARDS),
        ("OPTIMIZERS", optimizers.OPTIMIZERS),
    ):
        assert registries.names(registry) == sorted(there)


def test_a_new_file_needs_no_line_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "zoo/room").mkdir(parents=True)
    new = tmp_path / "zoo/room/new.py"
    new.write_text("PATTERNS = {'newest': Pattern(Heads)}\n")
    monkeypatch.setattr(registries, "PACKAGE", tmp_path)
    assert registries.names.__wrapped__("PATTERNS") == ["newest"]
    new.write_text("PATTERNS = {n: make(n) for n in NAMES}\n")
    assert registries.names.__wrapped__("PATTERNS") is None


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        ("train", ["--hparams_set=python_smal"], "Did you mean 'python_small'"),
        ("train", ["--hparams=learningrate=3"], "Did you mean 'learning_rate'"),
        ("train", ["--hparams=num_layers=0"], "`num_layers` in `--hparams` must be a"),
        (
            "train",
            ["--hparams=adam_beta_1=nan"],
            "`adam_beta_1` in `--hparams` must be",
        ),
        ("train", ["--hparams=routing=tokenchoice"], "Did you mean 'token_choice'"),
        ("train", ["--hparams=ema"], "`--hparams` must be name=value, joined by"),
        ("train", ["--import=my_head"], "`--import` must name modules that Python"),
        ("train", ["--import=json.py"], "`--import` must name modules that Python"),
        ("train", ["--problem=enwik"], "Received: --problem=enwik. Did you mean"),
        ("train", ["--files=no*where"], "`--files` must name existing files"),
        ("train", ["--problem_option=folder=no"], "`--problem_option=folder` must exi"),
        ("train", ["--problem_option=test_files=no"], "test_files` must name existing"),
        ("train", ["--init_checkpoint=no"], "`--init_checkpoint` must be a model dir"),
        ("evaluate", [], "Received: --model_dir='new', which does not exist. `python"),
        ("evaluate", ["--texts=none.txt"], "`--texts` must name existing files"),
        ("generate", [], "a .keras file or a preset directory. Received: --model_dir"),
        ("export", ["--export_dir=x"], "`--model_dir` must hold a run with a checkpo"),
        ("analyse", ["--what=jsd"], "`--model_dir` must hold a run with a checkpoint"),
    ],
)
def test_mistakes_are_told_before_anything_slow_is_imported(
    command, arguments, message, tmp_path
):
    done, imported = alone(tmp_path, command, "--model_dir=new", *arguments)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and message in told[0]
    assert not imported & SLOW
    assert not list(tmp_path.iterdir())


def test_problems_are_listed_at_once(tmp_path):
    done, imported = alone(tmp_path, "train", "--problem=list")
    assert done.returncode == 0
    names = [line.partition(": ")[0] for line in done.stdout.splitlines()]
    assert names == list(registries.problems())
    assert not imported & SLOW


def test_places_where_nothing_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    for command, *arguments in (
        (train, "--model_dir={}/file"),
        (train, "--model_dir={}/file/run"),
        (train, "--model_dir={}/run[1]/file"),  # TensorFlow would not find it again
        (export, "--model_dir=x", "--export_dir={}/run[1]/file"),
        (train, "--model_dir=x", "--data_dir={}/file"),
        (datagen, "--problem=digits", "--data_dir={}/file/deeper/still"),
        (datagen, "--problem=digits", "--data_dir={}/x", "--raw_dir={}/file"),
    ):
        with pytest.raises(ValueError, match="must be (in )?a folder.*/file'"):
            first_checks.check(parse(command, *(x.format(tmp_path) for x in arguments)))
    first_checks.check(parse(train, f"--model_dir={tmp_path}/new/run"))


INIT = ["--model_dir=x", "--init_checkpoint={}/step-4"]
CONVERTED = ["--checkpoint={}/model.ckpt", "--output_dir=out"]


@pytest.mark.parametrize(
    "command, arguments, name, message",
    [
        (evaluate, ["--model_dir={}"], "run.json", "which holds none"),
        (evaluate, ["--model_dir={}"], "config.json", "which holds none"),
        (evaluate, ["--model_dir={}"], "checkpoints", "which holds none"),
        (evaluate, ["--model_dir={}/a.keras"], "a.keras", "does not exist"),
        (evaluate, ["--model_dir={}/step-4"], "step-4.index", "does not exist"),
        (evaluate, ["--model_dir={}/step-8.index"], "step-8.index", "does not exist"),
        (train, INIT, "step-4.index", "does not exist"),
        (convert, CONVERTED, "model.ckpt.index", "must be the path of a TF1 checkpoi"),
        (convert, [*CONVERTED, "--hparams_file={}/a"], "a", "`--hparams_file` must ex"),
        (convert, [*CONVERTED, "--vocabulary={}/a"], "a", "`--vocabulary` must exist"),
    ],
)
def test_what_may_hold_a_model(command, arguments, name, message, tmp_path):
    if name == "a":
        (tmp_path / "model.ckpt.index").touch()
    options = parse(command, *(each.format(tmp_path) for each in arguments))
    with pytest.raises(ValueError, match=message):
        first_checks.check(options)
    (tmp_path / name).touch()
    first_checks.check(options)


@pytest.mark.parametrize("flag", ["--problem=my_own", "--hparams=vocabulary_size=3"])
def test_what_only_the_run_can_judge_is_left_to_it(flag):
    """Problems that a user has registered, and what follows from the problem."""
    assert "routing_tf.problems" in sys.modules
    assert first_checks.check(parse(train, "--model_dir=x", flag)) is None


OWN_PROBLEM = '''
from routing_tf import optimizers
from routing_tf import problems

@problems.register("zeros")
class Zeros(problems.Problem):
    """Nothing but zeros."""
'''


def test_modules_of_the_user_register_names(tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text(OWN_PROBLEM)
    flags = ["--model_dir=x", "--import=my_own", "--problem=list"]
    done = python("-m", "routing_tf.train", *flags, folder=tmp_path)
    assert "zeros: Nothing but zeros." in done.stdout.splitlines()
    (tmp_path / "broken.py").write_text("int('one')")
    flags = ["--model_dir=x", "--import=broken"]
    done = python("-m", "routing_tf.train", *flags, folder=tmp_path)
    assert "--import=broken, which raised ValueError: invalid" in done.stderr
    # Their names are left to the run, and nothing else.
    monkeypatch.delitem(sys.modules, "routing_tf.models", raising=False)
    names = ["--model_dir=x", "--hparams=routing=own,feed_forward=own"]
    with pytest.raises(ValueError, match="`routing` in `--hparams` must be a choice"):
        first_checks.check(parse(train, *names))
    first_checks.check(parse(train, "--import=json.tool", *names))
    with pytest.raises(ValueError, match="`hidden_dim` in `--hparams` must be a posi"):
        first_checks.check(
            parse(train, "--import=json", "--model_dir=x", "--hparams=hidden_dim=0")
        )

import inspect
import json
import re
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
        ("train", ["--hparams_set=python_smal"], r"=python_smal\. .*'python_small'"),
        ("train", ["--import=my_head"], "`--import`.*my_head"),
        ("train", ["--import=json.py"], r"`--import`.*json\.py"),
        ("evaluate", [], "--model_dir='new'"),
        ("generate", [], "--model_dir='new'"),
        ("export", ["--export_dir=x"], "`--model_dir`.*='new'"),
        ("analyse", ["--what=jsd"], "`--model_dir`.*='new'"),
    ],
)
def test_mistakes_are_told_before_anything_slow_is_imported(
    command, arguments, message, tmp_path
):
    done, imported = alone(tmp_path, command, "--model_dir=new", *arguments)
    assert done.returncode == 1
    (told,) = (x for x in done.stderr.splitlines() if x.startswith("error: "))
    assert re.search(message, told)
    assert not imported & SLOW
    assert not list(tmp_path.iterdir())


MISTAKES = [
    (train, "--hparams=learningrate=3", "'learningrate=3'.*'learning_rate'"),
    (train, "--hparams=num_layers=0", "`num_layers` .*`--hparams`.*num_layers="),
    (train, "--hparams=adam_beta_1=nan", "`adam_beta_1` .*`--hparams`.*adam_beta_1="),
    (train, "--hparams=routing=tokenchoice", "'tokenchoice'.*'token_choice'"),
    (train, "--hparams=ema", "`--hparams`.*'ema'"),
    (train, "--problem=enwik", "--problem=enwik.*'enwik8'"),
    (train, "--files=no*where", r"`--files`.*'no\*where'"),
    (train, "--problem_option=folder=no", "`--problem_option=folder`.*no'"),
    (train, "--problem_option=test_files=no", "`--problem_option=test_files`.*no'"),
    (train, "--init_checkpoint=no", "`--init_checkpoint`.*='no'"),
    (evaluate, "--texts=none.txt", r"`--texts`.*none\.txt"),
]
CHECKS = """
import importlib, json, sys
from routing_tf.cli import first_checks
from tests.command_line import parse
told = []
for command, flag in json.loads(sys.argv[1]):
    try:
        module = importlib.import_module(command)
        first_checks.check(parse(module, "--model_dir=new", flag))
    except ValueError as error:
        told.append(str(error))
print(json.dumps([told, list(sys.modules)]))
"""


def test_what_is_checked_needs_nothing_slow(tmp_path):
    """All in one process."""
    flags = json.dumps([(command.__name__, flag) for command, flag, _ in MISTAKES])
    done = python("-c", CHECKS, flags, folder=tmp_path)
    told, imported = json.loads(done.stdout)
    for (_, flag, message), error in zip(MISTAKES, told, strict=True):
        assert re.search(message, error), flag
    assert not SLOW.intersection(imported)
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
        with pytest.raises(ValueError, match="--[a-z_]*dir.*/file'"):
            first_checks.check(parse(command, *(x.format(tmp_path) for x in arguments)))
    first_checks.check(parse(train, f"--model_dir={tmp_path}/new/run"))


CONVERTED = ["--output_dir=out", "--checkpoint={}/model.ckpt"]


@pytest.mark.parametrize(
    "command, arguments, name",
    [
        (evaluate, ["--model_dir={}"], "run.json"),
        (evaluate, ["--model_dir={}"], "config.json"),
        (evaluate, ["--model_dir={}"], "checkpoints"),
        (evaluate, ["--model_dir={}/a.keras"], "a.keras"),
        (evaluate, ["--model_dir={}/step-4"], "step-4.index"),
        (evaluate, ["--model_dir={}/step-8.index"], "step-8.index"),
        (train, ["--model_dir=x", "--init_checkpoint={}/step-4"], "step-4.index"),
        (convert, CONVERTED, "model.ckpt.index"),
        (convert, [*CONVERTED, "--hparams_file={}/a"], "a"),
        (convert, [*CONVERTED, "--vocabulary={}/a"], "a"),
    ],
)
def test_what_may_hold_a_model(command, arguments, name, tmp_path):
    if name == "a":
        (tmp_path / "model.ckpt.index").touch()
    arguments = [each.format(tmp_path) for each in arguments]
    # The last one is refused.
    flag, _, path = arguments[-1].partition("=")
    options = parse(command, *arguments)
    with pytest.raises(ValueError, match=f"`{flag}`.*{flag}='{path}'"):
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


def test_modules_of_the_user_register_names(tmp_path, monkeypatch, works, refused):
    (tmp_path / "my_own.py").write_text(OWN_PROBLEM)
    monkeypatch.syspath_prepend(tmp_path)
    known = problems.registry._PROBLEMS
    monkeypatch.setattr(problems.registry, "_PROBLEMS", dict(known))
    listed = works(train, "--model_dir=x", "--import=my_own", "--problem=list")
    assert "zeros: Nothing but zeros." in listed.splitlines()
    (tmp_path / "broken.py").write_text("int('one')")
    said = refused(train, "--model_dir=x", "--import=broken")
    assert "--import=broken, which raised ValueError: invalid" in said
    # Their names are left to the run, and nothing else.
    monkeypatch.delitem(sys.modules, "routing_tf.models", raising=False)
    names = ["--model_dir=x", "--hparams=routing=own,feed_forward=own"]
    with pytest.raises(ValueError, match="`routing` .*`--hparams`.*routing='own'"):
        first_checks.check(parse(train, *names))
    first_checks.check(parse(train, "--import=json.tool", *names))
    with pytest.raises(ValueError, match="`hidden_dim` .*`--hparams`.*hidden_dim=0"):
        first_checks.check(
            parse(train, "--import=json", "--model_dir=x", "--hparams=hidden_dim=0")
        )

"""Tests of the command that converts checkpoints of the release."""

import functools
import json

import numpy as np
import pytest

from routing_tf import models
from routing_tf.cli import convert
from routing_tf.training import loading
from tests import command_line
from tests import golden_cases

FOLDER = golden_cases.FOLDER / "checkpoints"
run = functools.partial(command_line.run, convert)


def arguments_for(name, tmp_path):
    path = tmp_path / "hparams.json"
    hparams = golden_cases.load(f"models/{name}.npz").config["hparams"]
    path.write_text(json.dumps(hparams))
    return [
        f"--checkpoint={FOLDER / name / 'model.ckpt-1234'}",
        f"--hparams_file={path}",
        f"--output_dir={tmp_path / 'preset'}",
    ]


def test_a_converted_model_is_the_model(tmp_path, capsys):
    name = "pg19_released_hparams_json"
    assert not run(*arguments_for(name, tmp_path))
    assert "RoutingTransformerCausalLM.from_preset" in capsys.readouterr().out
    loaded = models.RoutingTransformerCausalLM.from_preset(str(tmp_path / "preset"))
    with np.load(FOLDER / name / "expected.npz") as file:
        targets, expected = file["in/targets"], file["out/logits"]
    ids = np.pad(targets, [(0, 0), (1, 0)])[:, :-1]
    inputs = {"token_ids": ids, "padding_mask": np.ones(ids.shape, "bool")}
    golden_cases.assert_close(golden_cases.run(loaded, inputs)[0], expected, 1e-4)


def test_what_settings_do_not_say_is_a_note(tmp_path, capsys):
    arguments = arguments_for("pg19_released_hparams_json", tmp_path)
    path = tmp_path / "hparams.json"
    hparams = json.loads(path.read_text())
    del hparams["share_qk"]
    path.write_text(json.dumps(hparams))
    assert not run(*arguments)
    err = capsys.readouterr().err
    assert "note: " in err and "share_qk is not given" in err
    assert "UserWarning" not in err


def test_an_image_model(tmp_path, refused):
    arguments = arguments_for("image_cifar10_local_cluster", tmp_path)
    assert not run(*arguments)
    loaded = loading.load_language_model(tmp_path / "preset")
    assert isinstance(loaded, models.RoutingImageTransformer)
    assert loaded.hyperparameters.num_channels == 3
    others = [f"--output_dir={tmp_path / 'b'}", f"--vocabulary={__file__}"]
    said = refused(convert, *arguments[:2], *others)
    assert "`--vocabulary` is for models of texts" in said


def test_mistakes_are_one_line_on_stderr(tmp_path, refused):
    arguments = arguments_for("pg19_local_cluster8k", tmp_path)
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "file").touch()
    said = refused(convert, *arguments)
    assert "`--output_dir` must be a new or empty folder" in said
    said = refused(convert, arguments[0], f"--output_dir={tmp_path / 'new'}")
    assert "`--hparams_file` or `--hparams_set` must give the settings that no" in said
    assert "without query_shape" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_rt_base_takes_less_than_six_gigabytes(tmp_path):
    """A checkpoint of its size with random values, in processes of their own."""
    make = """
import json, sys
import numpy as np
import tensorflow as tf
with open(sys.argv[1]) as file:
    table = json.load(file)["released_hparams_json"]["variables"]
draw = np.random.default_rng(0).standard_normal
tf.raw_ops.SaveV2(
    prefix=sys.argv[2],
    tensor_names=[v["name"] for v in table],
    shape_and_slices=[""] * len(table),
    tensors=[draw(v["shape"], dtype="float32") for v in table],
)
"""
    measure = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "routing_tf.convert", *sys.argv[1:]], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
    table = golden_cases.FOLDER / "pg19/full_size_variables.json"
    checkpoint = tmp_path / "model.ckpt"
    done = command_line.python("-c", make, table, checkpoint)
    assert done.returncode == 0, done.stderr
    flags = f"--checkpoint={checkpoint}", f"--output_dir={tmp_path / 'preset'}"
    result = command_line.python("-c", measure, *flags, "--hparams_set=pg19_rt_base")
    assert "490,718,460 parameters" in result.stdout, result.stderr
    kilobytes = int(result.stdout.splitlines()[-1])
    assert kilobytes < 6e6

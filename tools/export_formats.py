"""Prints which head groups each format of `model.export` has: the table of the docs.

Each model of one group is exported, and its outputs are compared with those of the
runtime of the format, in a process of its own. Needs `pip install -e ".[export]"`.

Usage: python tools/export_formats.py [--formats=onnx,litert] [--groups=full,local]
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

LENGTH, DIM = 12, 8
EXPERT = {"routing": "expert_choice"}
#: Endings of the files of each format, and the packages of its runtime.
FORMATS = {
    "tf_saved_model": ("", "tensorflow"),
    "onnx": (".onnx", "onnxruntime"),
    "openvino": (".xml", "openvino"),
    "litert": (".tflite", "ai_edge_litert"),
    "torch": (".pt2", "torch"),
}
TOLERANCE = 1e-4
# They have no causal form, or are their own pattern without one.
NOT_CAUSAL = (
    "routed, expert choice",
    "BlockPairHeads",
    "ClusteredQueryHeads",
    "InducedHeads",
    "LinformerHeads",
    "NystromHeads",
)


def groups():
    """Returns what makes each head group, by its row of the table."""
    from routing_tf import layers
    from routing_tf import zoo

    routed = functools.partial(layers.RoutedHeads, 2, 3, 5)
    return {
        "routed, token choice": routed,
        "routed, expert choice": functools.partial(routed, **EXPERT),
        "routed, expert choice, prefix": functools.partial(
            routed, routing_scope="prefix", **EXPERT
        ),
        "routed, expert threshold": functools.partial(
            routed, routing="expert_threshold"
        ),
        "hashed": lambda: layers.HashedHeads(2, 4, 5),
        "hashed, two rounds": lambda: layers.HashedHeads(2, 4, 5, num_rounds=2),
        "cluster-strided": lambda: layers.ClusterStridedHeads(2, 3, 5),
        "random": lambda: layers.RandomHeads(2, 3, 5),
        "full": lambda: layers.FullHeads(2),
        "local": lambda: layers.LocalHeads(2, (4,)),
        "sliding": lambda: layers.SlidingHeads(2, 3),
        "strided": lambda: layers.StridedHeads(2, (3,)),
        "fixed": lambda: layers.FixedHeads(2, (4,), 2),
        "AxialHeads": lambda: zoo.AxialHeads(2, width=3),
        "BlockPairHeads": lambda: zoo.BlockPairHeads(2, 3),
        "BlockTopKHeads": lambda: zoo.BlockTopKHeads(2, 3, 2),
        "ClusteredQueryHeads": lambda: zoo.ClusteredQueryHeads(2, 3, 4),
        "CompressedHeads": lambda: zoo.CompressedHeads(2),
        "FeatureMapHeads": lambda: zoo.FeatureMapHeads(2, chunk_length=3),
        "GlobalHeads": lambda: zoo.GlobalHeads(2, (0, 8), 4),
        "InducedHeads": lambda: zoo.InducedHeads(2, 3),
        "LinformerHeads": lambda: zoo.LinformerHeads(2, LENGTH, 3),
        "LongShortHeads": lambda: zoo.LongShortHeads(2, 5, 3, 2),
        "LunaHeads": lambda: zoo.LunaHeads(2, 3, chunk_length=3),
        "NativeSparseHeads": lambda: zoo.NativeSparseHeads(2, 4, 2, 4, 3),
        "NystromHeads": lambda: zoo.NystromHeads(2, 4),
        "RandomBlockHeads": lambda: zoo.RandomBlockHeads(2, 4, 1),
        "SinkhornHeads": lambda: zoo.SinkhornHeads(2, 4),
        "SynthesizerHeads": lambda: zoo.SynthesizerHeads(2, max_length=LENGTH),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--groups", help="some rows of the table; defaults to all")
    parser.add_argument("--job", choices=("export", "run"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    formats = flags.formats.split(",")
    rows = flags.groups.split(";") if flags.groups else None
    if flags.job:
        job = {"export": export, "run": run}[flags.job]
        job(formats[0], pathlib.Path(flags.folder), rows)
    else:
        print(table(results(formats, rows)), end="")


def results(formats, rows=None):
    """Returns, by row and format, whether a runtime computes what the layer does."""
    found = {}
    for name in formats:
        with tempfile.TemporaryDirectory() as folder:
            job("export", name, folder, rows)
            said = pathlib.Path(folder, "said.json")
            for row, error in json.loads(said.read_text()).items():
                # A runtime may end the process, so each file has one.
                if error is None:
                    error = job("run", name, folder, [row])
                found.setdefault(row, {})[name] = error
    return found


def job(kind, name, folder, rows):
    """Runs an export or a runtime in a process; returns the end of its errors."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    environment["KERAS_BACKEND"] = "torch" if name == "torch" else "tensorflow"
    command = [sys.executable, __file__, f"--job={kind}", f"--formats={name}"]
    command += [f"--folder={folder}"] + ([f"--groups={';'.join(rows)}"] if rows else [])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]


def inputs():
    """Returns the inputs of all models."""
    return np.random.default_rng(0).normal(size=(2, LENGTH, DIM)).astype("float32")


def place(folder, row, name):
    """Returns the path of the file of a row."""
    ending = FORMATS[name][0]
    return folder / ("".join(c if c.isalnum() else "_" for c in row) + ending)


def model_of(make, causal, length=LENGTH, mask=False):
    """Returns a Keras model of one head group, for batches of any size."""
    import keras

    from routing_tf import layers

    keras.utils.set_random_seed(1)
    attention = layers.MixedAttention([make()], key_dim=4)
    x = keras.Input((length, DIM), name="x")
    return keras.Model(x, attention(x, use_causal_mask=causal))


def export(name, folder, rows):
    """Exports the models, and writes their outputs and errors beside them."""
    import keras

    said = {}
    for row, make in groups().items():
        if rows and row not in rows:
            continue
        model = model_of(make, row not in NOT_CAUSAL)
        path = place(folder, row, name)
        np.save(f"{path}.npy", keras.ops.convert_to_numpy(model(inputs())))
        said[row] = None
        try:
            model.export(str(path), format=name, verbose=False)
        except Exception as error:
            said[row] = f"{type(error).__name__}: {error}"
        keras.utils.clear_session(free_memory=False)
    (folder / "said.json").write_text(json.dumps(said))


def run(name, folder, rows):
    """Compares the outputs of the runtime with those that were written."""
    for row in rows:
        path = place(folder, row, name)
        expected = np.load(f"{path}.npy")
        (output,) = RUNTIMES[name](str(path), [inputs()])
        error = np.abs(output - expected).max()
        if not error < TOLERANCE:
            sys.exit(f"other numbers, by up to {error:.1e}")


def run_tensorflow(path, values):
    """Returns the outputs of a SavedModel."""
    import tensorflow as tf

    outputs = tf.saved_model.load(path).serve(*map(tf.constant, values))
    return [np.asarray(output) for output in tf.nest.flatten(outputs)]


def run_onnx(path, values):
    """Returns the outputs of an ONNX file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    return session.run(None, dict(zip(names, values, strict=True)))


def run_openvino(path, values):
    """Returns the outputs of an OpenVINO file."""
    import openvino

    # Some processors would compute in bfloat16.
    precision = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(path, "CPU", precision)
    outputs = model(values)
    return [outputs[place] for place in model.outputs]


def run_litert(path, values):
    """Returns the outputs of a LiteRT file."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=path)
    places = interpreter.get_input_details()
    for each, value in zip(places, values, strict=True):
        interpreter.resize_tensor_input(each["index"], value.shape)
    interpreter.allocate_tensors()
    for each, value in zip(places, values, strict=True):
        interpreter.set_tensor(each["index"], value)
    interpreter.invoke()
    outputs = interpreter.get_output_details()
    return [interpreter.get_tensor(each["index"]) for each in outputs]


def run_torch(path, values):
    """Returns the outputs of an ExportedProgram."""
    import torch

    outputs = torch.export.load(path).module()(*map(torch.tensor, values))
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [output.detach().numpy() for output in outputs]


RUNTIMES = {
    "tf_saved_model": run_tensorflow,
    "onnx": run_onnx,
    "openvino": run_openvino,
    "litert": run_litert,
    "torch": run_torch,
}


def table(found):
    """Returns a table of results, in Markdown."""
    names = list(next(iter(found.values())))
    lines = [f"| heads | {' | '.join(f'`{name}`' for name in names)} |"]
    lines.append("| --- |" + " --- |" * len(names))
    for row, by_format in found.items():
        cells = ["yes" if by_format[n] is None else "no" for n in names]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""Prints which head groups each format of `model.export` has: the table of the docs.

Each model of one group is exported, and its outputs are compared with those of the
runtime of the format, in a process of its own. Needs `pip install -e ".[export]"`.

Usage: python tools/export_formats.py [--formats=onnx,litert] [--groups="full;local"]
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
#: Endings of the files of each format.
FORMATS = {
    "tf_saved_model": "",
    "onnx": ".onnx",
    "openvino": ".xml",
    "litert": ".tflite",
    "torch": ".pt2",
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
        "hashed": lambda: layers.HashedHeads(2, 4, 5),
        "cluster-strided": lambda: layers.ClusterStridedHeads(2, 3, 5),
        "random": lambda: layers.RandomHeads(2, 3, 5),
        "multipole": lambda: layers.MultipoleHeads(
            2, 3, 4, clusters_per_query=2, num_recent=4, num_sinks=1
        ),
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
        "IndexedHeads": lambda: zoo.IndexedHeads(2, 4, 2, 4, 2),
        "IndexedHeads, gathered": lambda: zoo.IndexedHeads(
            2, 4, 2, 4, 2, gather_length=1
        ),
        "InducedHeads": lambda: zoo.InducedHeads(2, 3),
        "LinformerHeads": lambda: zoo.LinformerHeads(2, LENGTH, 3),
        "LongShortHeads": lambda: zoo.LongShortHeads(2, 5, 3, 2),
        "LunaHeads": lambda: zoo.LunaHeads(2, 3, chunk_length=3),
        "NativeSparseHeads": lambda: zoo.NativeSparseHeads(2, 4, 2, 4, 3),
        "NystromHeads": lambda: zoo.NystromHeads(2, 4),
        "RandomBlockHeads": lambda: zoo.RandomBlockHeads(2, 3, 3),
        "ReformerHeads": lambda: zoo.ReformerHeads(2, 4, 5, num_rounds=2),
        "SinkhornHeads": lambda: zoo.SinkhornHeads(2, 4),
        "SynthesizerHeads": lambda: zoo.SynthesizerHeads(2, max_length=LENGTH),
        "ThresholdHeads": lambda: zoo.ThresholdHeads(2, 3, 5),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--groups", help="rows of the table; all by default")
    parser.add_argument("--export", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    names = flags.formats.split(",")
    rows = flags.groups.split(";") if flags.groups else list(groups())
    if flags.export:
        export(names[0], pathlib.Path(flags.export), rows)
    elif flags.run:
        run(names[0], flags.run)
    else:
        print(table(results(names, rows)), end="")


def results(names, rows):
    """Returns, by row and format, why a runtime does not compute what the layer does.

    None where it does.
    """
    found = {row: {} for row in rows}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            groups_flag = f"--groups={';'.join(rows)}"
            error = process(name, f"--export={folder}", groups_flag)
            if error is not None:
                raise RuntimeError(error)
            said = json.loads(pathlib.Path(folder, "said.json").read_text())
            for row, error in said.items():
                path = place(pathlib.Path(folder), row, name)
                found[row][name] = error or run_in_process(name, path)
    return found


def run_in_process(name, path):
    """Compares a file with what `write` wrote; returns what is wrong, or None."""
    return process(name, f"--run={path}")


def process(name, *flags):
    """Starts this program again; returns the last line of its errors, or None."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    environment["KERAS_BACKEND"] = "torch" if name == "torch" else "tensorflow"
    root = str(pathlib.Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([root] + ([path] if path else []))
    command = [sys.executable, __file__, f"--formats={name}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]


def place(folder, row, name):
    """Returns the path of the file of a row."""
    return folder / ("".join(c if c.isalnum() else "_" for c in row) + FORMATS[name])


def model_of(make, causal):
    """Returns a Keras model of one head group, for batches of any size."""
    import keras

    from routing_tf import layers

    keras.utils.set_random_seed(1)
    attention = layers.MixedAttention([make()], key_dim=4)
    x = keras.Input((LENGTH, DIM), name="x")
    return keras.Model(x, attention(x, use_causal_mask=causal))


def export(name, folder, rows):
    """Exports the models, and writes what went wrong."""
    import keras

    said = {}
    x = np.random.default_rng(0).normal(size=(2, LENGTH, DIM)).astype("float32")
    if name == "torch":  # Keras makes 1 of an unknown size.
        x = x[:1]
    for row in rows:
        model = model_of(groups()[row], row not in NOT_CAUSAL)
        try:
            write(model, name, place(folder, row, name), [x])
            said[row] = None
        except Exception as error:
            said[row] = f"{type(error).__name__}: {error}"
        keras.utils.clear_session(free_memory=False)
    (folder / "said.json").write_text(json.dumps(said))


def write(model, name, path, values, **options):
    """Exports a model, and writes inputs and its outputs beside it."""
    import keras

    output = model(values if len(values) > 1 else values[0], training=False)
    expected = {"expected": keras.ops.convert_to_numpy(output)}
    inputs = {f"input_{place}": value for place, value in enumerate(values)}
    np.savez(f"{path}.npz", **expected, **inputs)
    model.export(str(path), format=name, verbose=False, **options)


def run(name, path):
    """Compares the output of the runtime with the one that was written."""
    with np.load(f"{path}.npz") as arrays:
        values = [arrays[f"input_{place}"] for place in range(len(arrays) - 1)]
        expected = arrays["expected"]
    output = RUNTIMES[name](path, values)
    error = np.abs(output - expected).max()
    if not error < TOLERANCE:
        sys.exit(f"other numbers, by up to {error:.1e}")


def run_tensorflow(path, values):
    """Returns the output of a SavedModel."""
    import tensorflow as tf

    inputs = [tf.constant(value) for value in values]
    served = tf.saved_model.load(path)  # which owns the variables
    return served.serve(inputs if len(inputs) > 1 else inputs[0]).numpy()


def run_onnx(path, values):
    """Returns the output of an ONNX file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    return session.run(None, dict(zip(names, values, strict=True)))[0]


def run_openvino(path, values):
    """Returns the output of an OpenVINO file."""
    import openvino

    # Some processors would compute in bfloat16.
    precision = {"INFERENCE_PRECISION_HINT": "f32"}
    # Steps on the way come after the output of the model.
    return openvino.Core().compile_model(path, "CPU", precision)(values)[0]


def run_litert(path, values):
    """Returns the output of a LiteRT file."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=path)
    inputs = interpreter.get_input_details()
    # They come in the order of their names.
    values = [next(v for v in values if v.dtype == each["dtype"]) for each in inputs]
    for each, value in zip(inputs, values, strict=True):
        interpreter.resize_tensor_input(each["index"], value.shape)
    interpreter.allocate_tensors()
    for each, value in zip(inputs, values, strict=True):
        interpreter.set_tensor(each["index"], value)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def run_torch(path, values):
    """Returns the output of an ExportedProgram."""
    import torch

    program = torch.export.load(path).module()
    return program(*map(torch.tensor, values)).detach().numpy()


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
    for row, errors in found.items():
        cells = ["yes" if errors[name] is None else "no" for name in names]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

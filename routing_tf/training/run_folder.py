"""The folder of a run: its settings and its checkpoints.

- `run.json`: settings of the run, with which a later run there must agree.
- `checkpoints/`: `step-400` and the two before it, see `training.checkpoints`.
- `checkpoints/best`: the one with the lowest held-out loss so far.
- `preprocessor/`: the tokenizer and the lengths of texts, as a keras_hub preset.
- `metrics.jsonl`: one JSON object per logged step.
- `tensorboard/`: the same numbers for TensorBoard.
- `data/`: ids of large text files that have no other folder.
"""

import contextlib
import json
import pathlib
import shutil

import keras

from routing_tf.files import folder_lock
from routing_tf.files import safe_loading
from routing_tf.files.atomic import told_where
from routing_tf.files.folders import make_folder
from routing_tf.models.build import model_class
from routing_tf.training import checkpoints

PREPROCESSOR = "preprocessor"


@contextlib.contextmanager
def hold(model_dir):
    """Keeps other processes from training in a model directory, made if missing.

    Raises a `ValueError` if another process trains there already.
    """
    make_folder("model_dir", checkpoints.folder_of(model_dir))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock.hold(model_dir, wait=False))
        except BlockingIOError as error:
            raise ValueError(
                "`model_dir` must not be in use: another process trains there. "
                f"Received: {str(model_dir)!r}. Wait for its end, or use another "
                "model_dir"
            ) from error
        yield


def save_preprocessor(lm, model_dir):
    """Writes the preprocessor of a model, if it has one, into its model directory.

    The preprocessor of an earlier run is removed.
    """
    preprocessor = getattr(lm, "preprocessor", None)
    folder = pathlib.Path(model_dir, PREPROCESSOR)
    partial = folder.with_name(f"{folder.name}.partial")
    with told_where(folder):
        shutil.rmtree(partial, ignore_errors=True)
        if preprocessor is not None:
            preprocessor.save_to_preset(str(partial))
            # keras_hub reads the class of the backbone from it.
            backbone = keras.saving.serialize_keras_object(lm.backbone)
            config = json.dumps(backbone, indent=2) + "\n"
            (partial / "config.json").write_text(config)
        if folder.exists():
            shutil.rmtree(folder)
        if preprocessor is not None:
            partial.replace(folder)


def load_preprocessor(model_dir, kind):
    """Loads a run's own copy of its preprocessor; None if it has none."""
    folder = pathlib.Path(model_dir, PREPROCESSOR)
    if not folder.is_dir():
        return None
    safe_loading.check_preset(folder, has_weights=False)
    return model_class(kind).preprocessor_cls.from_preset(str(folder))


def check_tokenizer(problem, model_dir, kind):
    """Raises a `ValueError` if the tokenizer of a problem is not that of a run.

    `kind` is that of its model, see `Hyperparameters`.
    """
    own = getattr(load_preprocessor(model_dir, kind), "tokenizer", None)
    if own is None or problem.tokenizer is None:
        return
    if _vocabulary_of(own) != _vocabulary_of(problem.tokenizer):
        raise ValueError(
            "The problem's tokenizer must be that of the run, in "
            f"{str(pathlib.Path(model_dir, PREPROCESSOR))!r}. Received: {problem.name} "
            f"with a {type(problem.tokenizer).__name__} of other tokens. Give it the "
            "vocabulary with which the run began"
        )


def _vocabulary_of(tokenizer):
    try:
        return type(tokenizer).__name__, tokenizer.get_vocabulary()
    except NotImplementedError:  # a tokenizer of the user
        return type(tokenizer).__name__, None


def save_run(config, lm, model_dir, step=0):
    """Writes a model as a run at a step; its folder is made if missing."""
    checkpoints.folder_of(model_dir).mkdir(parents=True, exist_ok=True)
    config.save(model_dir)
    save_preprocessor(lm, model_dir)
    saved = checkpoints.RunCheckpoints(model_dir, lm)
    saved.save(step)
    saved.wait()

"""The folder of a run: its settings and its checkpoints.

run.json         what is trained on what; a later run there must agree
checkpoints/     step-400 and the two before it, see `run_checkpoints`
checkpoints/best the one with the lowest held-out loss so far
preprocessor/    the tokenizer and the lengths of texts, as a keras_hub preset
metrics.jsonl    one JSON object per logged step
tensorboard/     the same numbers for TensorBoard
data/            ids of large text files that have no other folder
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import warnings
import zipfile

import keras
import numpy as np
from absl import logging

from routing_tf import folder_lock
from routing_tf import models
from routing_tf import problems
from routing_tf import run_checkpoints
from routing_tf import untrusted
from routing_tf.layers import Compatibility
from routing_tf.layers.validation import check_choice
from routing_tf.layers.validation import check_positive_integer
from routing_tf.models.checkpoints import ReleaseCheckpoint
from routing_tf.models.checkpoints import load_into
from routing_tf.tokenizers import subword_tokenizer

# Precision of a run, and the dtype policy of its model.
PRECISIONS = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}
PREPROCESSOR = "preprocessor"
# What may change when a run goes on: its length, where its data lies, and what changes
# no more than the rounding.
FREE_TO_CHANGE = {
    "data_dir",
    "hparams_set",
    "hyperparameters.train_steps",
    "hyperparameters.remat",
    "hyperparameters.remat_attention",
    "accumulation_steps",
}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run trains on what, as `run.json` holds it; made by `configure`.

    Args:
        problem: name of the problem.
        hyperparameters: `Hyperparameters` of the model and its training.
        hparams_set: name of the preset they come from, for the reader.
        data_dir: folder of the problem's data, or None.
        problem_options: dict of the problem's other options.
        num_tokens: dict of the number of ids in the splits that the run trains on and
            is scored on.
        checksums: dict of the checksums of these splits, by which changed data is
            noticed; a run of an earlier version has none.
        init_checkpoint: where the first weights come from; None for random ones.
        seed: seed of weights, data order and dropout.
        precision: type of computations: `"float32"`, `"bfloat16"` or `"float16"`, the
            last with a scaled loss. Weights, centroids and the optimizer are float32.
        accumulation_steps: number of parts that a batch goes through the model in.
    """

    problem: str
    hyperparameters: models.Hyperparameters
    hparams_set: str = ""
    data_dir: str | None = None
    problem_options: dict = dataclasses.field(default_factory=dict)
    num_tokens: dict = dataclasses.field(default_factory=dict)
    checksums: dict = dataclasses.field(default_factory=dict)
    init_checkpoint: str | None = None
    seed: int = 0
    precision: str = "float32"
    accumulation_steps: int = 1

    def __post_init__(self):
        check_choice("precision", self.precision, tuple(PRECISIONS))
        check_positive_integer("accumulation_steps", self.accumulation_steps)
        for name in ("problem_options", "num_tokens", "checksums"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(
                    f"`{name}` must be a dict. Received: {getattr(self, name)!r}"
                )

    def make_problem(self, model_dir=None):
        """Returns the problem, whose windows are as long as the model's sequences.

        Args:
            model_dir: folder of the run; None (the default) for none. Its own copy
                takes the place of a vocabulary that is no longer what it was. Beside
                the run lies what a problem without a `data_dir` makes of large data.
        """
        options = problems.get_class(self.problem).options_for(self.hyperparameters)
        options = {**options, **self.problem_options}
        if model_dir is not None:
            options.update(own_vocabulary(model_dir, options.get("vocabulary")))
        problem = problems.get(self.problem, data_dir=self.data_dir, **options)
        if model_dir is not None:
            problem.work_dir = str(pathlib.Path(model_dir, "data"))
        return problem

    @classmethod
    def load(cls, model_dir):
        """Reads the `run.json` of a model directory; None if there is none.

        Raises:
            ValueError: if it cannot be understood.
        """
        path = pathlib.Path(model_dir, "run.json")
        try:
            fields = untrusted.read_json(path)
            untrusted.check_hyperparameters(fields["hyperparameters"], path)
            hyperparameters = models.Hyperparameters.from_dict(
                fields.pop("hyperparameters")
            )
            return cls(hyperparameters=hyperparameters, **fields)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                "`model_dir` must hold a run.json of this version of routing_tf, or "
                f"none. Received: {str(path)!r}: {error}"
            ) from error

    def save(self, model_dir):
        """Writes `run.json`."""
        path = pathlib.Path(model_dir, "run.json")
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def check_continues(self, earlier, model_dir):
        """Raises a `ValueError` if a run with `earlier` cannot go on with this one."""
        there, here = _flat(earlier._of_splits(self)), _flat(self._of_splits(earlier))
        names = sorted((there.keys() | here.keys()) - FREE_TO_CHANGE)
        differences = [
            f"{name} was {there.get(name)!r}, now {here.get(name)!r}"
            for name in names
            if there.get(name) != here.get(name)
        ]
        if differences:
            raise ValueError(
                "`model_dir` must be new, or the run in it must have the same "
                f"settings and data. Received: {str(model_dir)!r}, where "
                f"{'; '.join(differences)}. Use another model_dir, or leave these "
                "settings out to continue that run"
            )

    def _of_splits(self, other):
        """This one without what it alone tells of splits.

        Earlier versions had no checksums, and counted splits that a run does not use.
        """
        fields = {
            name: {
                split: value
                for split, value in getattr(self, name).items()
                if split in getattr(other, name)
            }
            for name in ("num_tokens", "checksums")
        }
        return dataclasses.replace(self, **fields)

    def check_data(self, problem, split):
        """Raises a `ValueError` if a split of the run is no longer what it was.

        Args:
            problem: its problem.
            split: the split. One that the run has not used tells nothing, but of
                files of one's own, where the last one that it has used is looked at.
        """
        is_new = split not in self.num_tokens and self.num_tokens
        if is_new and isinstance(problem, problems.OwnFilesProblem):
            split = list(self.num_tokens)[-1]
        there = self.num_tokens.get(split), self.checksums.get(split)
        here = problem.num_tokens(split), problem.checksum(split)
        if any(was not in (None, now) for was, now in zip(there, here)):
            raise ValueError(
                f"The data of the split {split!r} must be what the run has used. "
                f"Received: a number of ids and a checksum of {here}, which were "
                f"{there}. To score other data, name it, such as with --files, "
                "--data_dir or --problem"
            )


def _flat(config):
    """The fields of a `RunConfig` by dotted names, as JSON gives them back."""

    def walk(prefix, value):
        if not isinstance(value, dict):
            return {prefix: value}
        items = [walk(f"{prefix}.{key}", item) for key, item in value.items()]
        return {key: item for found in items for key, item in found.items()}

    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    return {key.removeprefix("."): value for key, value in walk("", fields).items()}


def configure(problem, hyperparameters, model_dir=None, **fields):
    """Makes the configuration of a run, and its problem.

    Args:
        problem: name of the problem.
        hyperparameters: `Hyperparameters`; the vocabulary size is the problem's.
        model_dir: folder of the run, if it may be there already; see
            `RunConfig.make_problem`.
        **fields: other fields of `RunConfig`.

    Returns:
        `RunConfig` and the prepared problem.

    Raises:
        ValueError: if the problem or its data is not there, or a model of these
            hyperparameters does not fit it.
    """
    source = fields.get("init_checkpoint")
    if source and is_release_checkpoint(source):
        # The weights rely on them, and on keys of their own.
        hyperparameters = hyperparameters.replace(
            compatibility=Compatibility.trained(),
            routed_key_shift=0,
            local_key_shift=0,
        )
    config = RunConfig(problem, hyperparameters, **fields)
    problem = config.make_problem(model_dir)
    problem.check_hyperparameters(hyperparameters)
    problem.prepare()
    splits = dict.fromkeys((problem.train_split, problem.eval_split))
    config = dataclasses.replace(
        config,
        hyperparameters=hyperparameters.replace(
            vocabulary_size=problem.vocabulary_size
        ),
        num_tokens={split: problem.num_tokens(split) for split in splits},
        checksums={split: problem.checksum(split) for split in splits},
    )
    return config, problem


def make_model(hyperparameters, preprocessor=None, precision="float32"):
    """Makes the model of hyperparameters.

    Args:
        hyperparameters: `Hyperparameters`.
        preprocessor: what turns text into inputs; None (the default) for models of ids.
        precision: see `RunConfig`.

    Returns:
        A `RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` or
        `RoutingImageTransformer`.
    """
    backbone = make_backbone(hyperparameters, PRECISIONS[precision])
    if hyperparameters.kind == "image":
        return backbone
    cls = models.RoutingTransformerCausalLM
    if hyperparameters.kind == "seq2seq":
        cls = models.RoutingTransformerSeq2SeqLM
    return cls(backbone, preprocessor=preprocessor)


def make_backbone(hyperparameters, dtype=None):
    """Makes a model without what turns its output into logits, or an image model."""
    classes = {
        "text": models.RoutingTransformer,
        "seq2seq": models.RoutingTransformerEncoderDecoder,
        "image": models.RoutingImageTransformer,
    }
    return classes[hyperparameters.kind](hyperparameters, dtype=dtype)


def make_folder(model_dir):
    """Makes a model directory, if it is missing.

    Raises:
        ValueError: if it cannot be written.
    """
    try:
        run_checkpoints.folder_of(model_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            "`model_dir` must be a folder that can be written. Received: "
            f"{str(model_dir)!r}: {error.strerror}"
        ) from error


@contextlib.contextmanager
def hold(model_dir):
    """Keeps other processes from training in a model directory, made if missing.

    Args:
        model_dir: folder of the run.

    Raises:
        ValueError: if another process trains there, or it cannot be written.
    """
    make_folder(model_dir)
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
    """Writes the preprocessor of a model into its model directory, if it has one.

    Args:
        lm: the model.
        model_dir: folder of the run, which loses what an earlier one left there.

    Raises:
        OSError: if it cannot be written.
    """
    preprocessor = getattr(lm, "preprocessor", None)
    folder = pathlib.Path(model_dir, PREPROCESSOR)
    partial = folder.with_name(f"{folder.name}.partial")
    with _told_where(folder):
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
    """Loads a run's own copy of its preprocessor.

    Args:
        model_dir: folder of the run.
        kind: the kind of its model, see `Hyperparameters`.

    Returns:
        The preprocessor; None if the run has none.
    """
    folder = pathlib.Path(model_dir, PREPROCESSOR)
    if not folder.is_dir():
        return None
    untrusted.check_preset(folder, has_weights=False)
    cls = models.RoutingTransformerCausalLMPreprocessor
    if kind == "seq2seq":
        cls = models.RoutingTransformerSeq2SeqLMPreprocessor
    return cls.from_preset(str(folder))


def check_tokenizer(problem, model_dir, kind):
    """Raises a `ValueError` if the tokenizer of a problem is not that of a run.

    Args:
        problem: the problem.
        model_dir: folder of the run, whose own copy counts.
        kind: the kind of its model, see `Hyperparameters`.
    """
    own = getattr(load_preprocessor(model_dir, kind), "tokenizer", None)
    if own is None or problem.tokenizer is None:
        return
    if _vocabulary_of(own) != _vocabulary_of(problem.tokenizer):
        raise ValueError(
            "The problem's tokenizer must be that of the run, in "
            f"{str(pathlib.Path(model_dir, PREPROCESSOR))!r}. Received: {problem.name} "
            f"with a {type(problem.tokenizer).__name__} of other tokens. Give it the "
            "vocabulary that the run began with"
        )


def _vocabulary_of(tokenizer):
    try:
        return type(tokenizer).__name__, tokenizer.get_vocabulary()
    except NotImplementedError:  # one of the user's own
        return type(tokenizer).__name__, None


def own_vocabulary(model_dir, vocabulary):
    """Returns the option that names a run's own copy of its vocabulary, if needed.

    Args:
        model_dir: folder of the run.
        vocabulary: the option of the problem, or None.

    Returns:
        `{"vocabulary": path}` if the file of this name, with which the run began, is
        not the same any more; else `{}`.
    """
    if vocabulary in (None, "bytes", "subwords"):
        return {}
    earlier = RunConfig.load(model_dir)
    if earlier is None or not run_checkpoints.resumable(model_dir):
        return {}
    folder = pathlib.Path(model_dir, PREPROCESSOR).absolute()
    own = list(folder.rglob(subword_tokenizer.VOCABULARY_FILE))
    if not own or vocabulary != earlier.problem_options.get("vocabulary"):
        return {}
    if _subwords(vocabulary) == _subwords(own[0]):
        return {}
    logging.warning(
        "%s is not what it was when the run began: its own copy counts, %s",
        vocabulary,
        own[0],
    )
    return {"vocabulary": str(own[0])}


def _subwords(path):
    """The tokens of a file; None if there are none."""
    try:
        return subword_tokenizer.SubwordTokenizer().read_tokens(path)
    except (OSError, ValueError):
        return None


def save_run(config, lm, model_dir, step=0):
    """Writes a model as a run that has come to a step.

    Args:
        config: `RunConfig`.
        lm: its model.
        model_dir: folder of the run, made if missing.
        step: number of steps trained. Defaults to 0.
    """
    run_checkpoints.folder_of(model_dir).mkdir(parents=True, exist_ok=True)
    config.save(model_dir)
    save_preprocessor(lm, model_dir)
    saved = run_checkpoints.RunCheckpoints(model_dir, lm)
    saved.save(step)
    saved.wait()


def load_run(checkpoint):
    """Loads the model of a run's checkpoint.

    Args:
        checkpoint: path of the checkpoint without .index.

    Returns:
        The model, not compiled for training.

    Raises:
        ValueError: if the checkpoint or the files of its run cannot be read.
    """
    model_dir = run_checkpoints.model_dir_of(checkpoint)
    config = RunConfig.load(model_dir)
    if config is None:
        raise ValueError(
            "A checkpoint must lie in the folder of its run, with its run.json. "
            f"Received: {str(checkpoint)!r}"
        )
    h = config.hyperparameters
    preprocessor = load_preprocessor(model_dir, h.kind)
    untrusted.check_fits(
        lambda: make_backbone(h), run_checkpoints.num_bytes(checkpoint), model_dir
    )
    lm = make_model(h, preprocessor, config.precision)
    run_checkpoints.restore(checkpoint, run_checkpoints.named_variables(lm, False))
    return lm


def load_language_model(source, which="last"):
    """Loads a trained language model.

    Args:
        source: a model directory; the path of a checkpoint without .index; a `.keras`
            file; or a keras_hub preset directory.
        which: which checkpoint of a model directory: `"last"` (the default) or
            `"best"`.

    Returns:
        A `RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` or
        `RoutingImageTransformer`, not compiled for training.

    Raises:
        ValueError: if there is no such thing.
    """
    path = pathlib.Path(str(source).removesuffix(".index"))
    if run_checkpoints.is_run_checkpoint(path):
        return load_run(path)
    saved = run_checkpoints.resumable(path, which)
    if saved:
        return load_run(saved[-1])
    if run_checkpoints.paths(path):
        raise ValueError(
            f"`checkpoint` must be 'last': there is no best one in {str(source)!r}, "
            f"whose run has not been evaluated. Received: checkpoint={which!r}"
        )
    refuse_old_checkpoints(path)
    try:
        with warnings.catch_warnings():
            # It is not compiled for training, so its optimizer stays empty.
            warnings.filterwarnings("ignore", "Skipping variable loading")
            if path.suffix == ".keras":
                return untrusted.load_keras_file(path)
            config = path / "config.json"
            if config.is_file():
                cls = models.RoutingTransformerCausalLM
                backbone = models.RoutingTransformerEncoderDecoder.__name__
                if untrusted.read_json(config)["class_name"] == backbone:
                    cls = models.RoutingTransformerSeq2SeqLM
                return cls.from_preset(str(path))
    except (OSError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"The model {source!r} cannot be read: {error}") from error
    raise ValueError(
        "A model is given as a model directory with checkpoints, a checkpoint of one "
        "without .index, a .keras file, a preset directory with a config.json, or to "
        "start from the path of a checkpoint of the release without .index. Received: "
        f"{source!r}"
    )


def refuse_old_checkpoints(model_dir):
    """Raises a `ValueError` if a run of an earlier version lives in a folder."""
    old = sorted(run_checkpoints.folder_of(model_dir).glob("step_*.keras"))
    if old and not run_checkpoints.paths(model_dir):
        raise ValueError(
            "`model_dir` must hold a run of this version. Received: "
            f"{str(model_dir)!r}, whose checkpoints are of an earlier one. Use another "
            f"model_dir with init_checkpoint={str(old[-1])!r}, which takes its weights"
        )


def is_release_checkpoint(source):
    """Tells whether a path is that of a checkpoint of the original release."""
    if run_checkpoints.is_run_checkpoint(source):
        return False
    return pathlib.Path(f"{str(source).removesuffix('.index')}.index").is_file()


def initialize(lm, source):
    """Gives a model of its own settings the weights of another.

    Args:
        lm: the model to write into.
        source: as for `load_language_model`, or the path of a checkpoint of the
            original release.

    Raises:
        ValueError: if there is no such thing, or the models have different variables;
            nothing is written then.
    """
    if is_release_checkpoint(source):
        load_into(lm, ReleaseCheckpoint(source))
    else:
        copy_weights(load_language_model(source), lm)


def copy_weights(source, target):
    """Copies all weights and the k-means state from one model to another.

    Args:
        source: the language model to copy from.
        target: the language model to copy to.

    Raises:
        ValueError: if the models have different variables; nothing is copied then.
    """
    there = {variable.path: tuple(variable.shape) for variable in source.weights}
    here = {variable.path: tuple(variable.shape) for variable in target.weights}
    differences = [
        f"{path} has the shape {there.get(path)} there, {here.get(path)} here"
        for path in sorted(there.keys() | here.keys())
        if there.get(path) != here.get(path)
    ]
    if differences:
        raise ValueError(
            "The model to start from must have the same variables. Received: "
            f"{len(differences)} differences: {'; '.join(differences)}. Use the "
            "hyperparameters it was trained with, and a problem with its vocabulary"
        )
    values = {variable.path: variable for variable in source.weights}
    for variable in target.weights:
        variable.assign(np.asarray(values[variable.path]))


def write_whole(path, text):
    """Writes a file so that it is never seen half written.

    Raises:
        OSError: if it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    with _told_where(path):
        partial.write_text(text)
        partial.replace(path)


@contextlib.contextmanager
def _told_where(path):
    """Names what could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{str(path)!r} must be written; is the disk full? Received: "
            f"{error.strerror or error}"
        ) from error

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
import dataclasses
import json
import pathlib
import shutil

import keras
from absl import logging

from routing_tf import models
from routing_tf import problems
from routing_tf.files import safe_loading
from routing_tf.files.atomic import locked
from routing_tf.files.atomic import told_where
from routing_tf.files.atomic import write_whole
from routing_tf.files.named_files import make_folder
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.models.build import POLICIES
from routing_tf.models.build import model_class
from routing_tf.settings.hyperparameters import HYPERPARAMETERS
from routing_tf.tokenizers import subword_tokenizer
from routing_tf.training import checkpoints

# Settings that may change when a run continues: its length, the place of its data, and
# settings that change only the rounding.
FREE_TO_CHANGE = {
    "data_dir",
    "hparams_set",
    "accumulation_steps",
    *(
        f"hyperparameters.{name}"
        for name, own in HYPERPARAMETERS.items()
        if own.may_change
    ),
}
# Fields that show that the data has changed.
OF_DATA = ("num_tokens.", "checksums.")

PREPROCESSOR = "preprocessor"


@contextlib.contextmanager
def hold(model_dir):
    """Keeps other processes from training in a model directory, made if missing.

    Raises a `ValueError` if another process trains there already.
    """
    make_folder("model_dir", checkpoints.folder_of(model_dir))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(model_dir, wait=False))
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


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of a run, as in its `run.json`; made by `configure`.

    Args:
        problem: name of the problem.
        hyperparameters: `Hyperparameters` of the model and its training.
        hparams_set: name of the preset that they come from, for people.
        data_dir: folder of the problem's data, or None.
        problem_options: dict of the problem's other options.
        num_tokens: dict of the number of ids in the splits that the run trains on and
            is scored on.
        checksums: dict of the checksums of these splits, which reveal changed data.
        init_checkpoint: source of the initial weights; None for random ones.
        seed: seed of weights, data order and dropout.
        precision: dtype of computations: `"float32"`, `"bfloat16"`, or `"float16"` with
            a scaled loss. Weights, centroids and the optimizer are float32.
        accumulation_steps: number of micro-batches per step.
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
        check_choice("precision", self.precision, POLICIES)
        check_positive_integer("accumulation_steps", self.accumulation_steps)
        for name in ("problem_options", "num_tokens", "checksums"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(
                    f"`{name}` must be a dict. Received: {getattr(self, name)!r}"
                )

    def make_problem(self, model_dir=None):
        """Returns the problem, whose windows are as long as the model's sequences.

        A run's own copy in `model_dir` replaces a vocabulary that has changed. Without
        a `data_dir`, a problem stores ids of large data in that folder.
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
        """Reads the `run.json` of a model directory; None if there is none."""
        path = pathlib.Path(model_dir, "run.json")
        try:
            fields = safe_loading.read_json(path)
            safe_loading.check_hyperparameters(fields["hyperparameters"], path)
            hyperparameters = models.Hyperparameters.from_dict(
                fields.pop("hyperparameters")
            )
            return cls(hyperparameters=hyperparameters, **fields)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                "`model_dir` must hold a run.json of this version of routing_tf, or "
                f"none. Received: {str(path)!r}: {error}. Names that modules of your "
                "own register need `--import`"
            ) from error

    def save(self, model_dir):
        """Writes `run.json`."""
        path = pathlib.Path(model_dir, "run.json")
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def check_continues(self, earlier, model_dir):
        """Raises a `ValueError` if a run with `earlier` cannot continue as this one."""
        there, here = _flat(earlier), _flat(self)
        names = (there.keys() | here.keys()) - FREE_TO_CHANGE
        names = sorted(name for name in names if there.get(name) != here.get(name))
        differences = [
            f"{name} was {there.get(name)!r}, now {here.get(name)!r}"
            for name in names
            if not name.startswith(OF_DATA)
        ]
        if names and not differences:  # otherwise the data has changed for a reason
            splits = dict.fromkeys(name.partition(".")[2] for name in names)
            differences = [
                f"the data of the split {split!r} has changed (it had "
                f"{earlier.num_tokens.get(split, 0):,} tokens, now "
                f"{self.num_tokens.get(split, 0):,})"
                for split in splits
            ]
        if differences:
            raise ValueError(
                "`model_dir` must be new, or the run in it must have the same "
                f"settings and data. Received: {str(model_dir)!r}, where "
                f"{'; '.join(differences)}. Use another model_dir, or leave these "
                "settings out to continue that run"
            )

    def check_data(self, problem, split):
        """Raises a `ValueError` if a split of the run has changed.

        A split that the run has not used cannot be checked, except for the user's own
        files, where the last used split is checked.
        """
        is_new = split not in self.num_tokens and self.num_tokens
        if is_new and problem.has_own_files:
            split = list(self.num_tokens)[-1]
        there = self.num_tokens.get(split), self.checksums.get(split)
        here = problem.num_tokens(split), problem.checksum(split)
        if any(was not in (None, now) for was, now in zip(there, here)):
            raise ValueError(
                f"The data of the split {split!r} must be the one that the run used. "
                f"Received: a number of ids and a checksum of {here}, which were "
                f"{there}. To score other data, name it, for example with --files, "
                "--data_dir or --problem"
            )


def _flat(config):
    """The fields of a `RunConfig` by dotted names, as JSON returns them."""

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
        hyperparameters: `Hyperparameters`; the problem gives the vocabulary size and,
            for models of images, the shape and the classes.
        model_dir: folder of the run, if it may exist already; see
            `RunConfig.make_problem`.
        **fields: other fields of `RunConfig`.

    Returns:
        `RunConfig` and the prepared problem.

    Raises:
        ValueError: if the problem or its data does not exist, or a model of these
            hyperparameters does not fit it.
    """
    source = fields.get("init_checkpoint")
    if source and is_release_checkpoint(source):
        # The weights rely on them, and on separate keys.
        hyperparameters = hyperparameters.replace(
            compatibility="trained",
            routed_key_shift=0,
            local_key_shift=0,
        )
    config = RunConfig(problem, hyperparameters, **fields)
    problem = config.make_problem(model_dir)
    hyperparameters = problem.fit_hyperparameters(hyperparameters)
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


def own_vocabulary(model_dir, vocabulary):
    """Returns the option that names a run's own copy of its vocabulary, if needed.

    It is `{"vocabulary": path}` if the file with which the run began has changed;
    otherwise `{}`.
    """
    if vocabulary in (None, "bytes", "subwords"):
        return {}
    earlier = RunConfig.load(model_dir)
    if earlier is None or not checkpoints.resumable(model_dir):
        return {}
    folder = pathlib.Path(model_dir, PREPROCESSOR).absolute()
    own = list(folder.rglob(subword_tokenizer.VOCABULARY_FILE))
    if not own or vocabulary != earlier.problem_options.get("vocabulary"):
        return {}
    if _subwords(vocabulary) == _subwords(own[0]):
        return {}
    logging.warning(
        "%s has changed since the run began; using the run's own copy, %s",
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


def is_release_checkpoint(source):
    """Returns whether a path is that of a checkpoint of the original release."""
    path = str(source).removesuffix(".index")
    if checkpoints.is_run_checkpoint(path):
        return False
    return pathlib.Path(f"{path}.index").is_file()

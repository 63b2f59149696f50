import numpy as np
import pytest

from routing_tf import models
from routing_tf import problems
from routing_tf.files.names import SPLITS
from routing_tf.problems import registry
from routing_tf.settings import registries


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_PROBLEMS", dict(registry._PROBLEMS))


def make_class():
    class Zeros(problems.Problem):
        """Nothing but zeros.

        More about them.
        """

        vocabulary_size = 1

        def __init__(self, size=10, **kwargs):
            super().__init__(**kwargs)
            self.size = int(size)

        def load(self):
            return dict.fromkeys(SPLITS, np.zeros(self.size, "uint16"))

    return Zeros


def test_own_problem(clean_registry):
    own = problems.register("zeros")(make_class())
    problem = problems.get("zeros", data_dir="folder", size="12", sequence_length="3")
    assert type(problem) is own
    assert problem.name == own.name == "zeros"
    assert problem.data_dir == "folder"
    assert problem.sequence_length == 3
    assert problem.num_tokens("train") == 12
    assert "zeros" in problem.describe()


# Those of one's own files have the shapes of the files.
OF_FILES = ("text_files", "parallel_files", "image_folder")


@pytest.mark.parametrize(
    "name", [name for name in registries.problems() if name not in OF_FILES]
)
def test_default_hyperparameters_fit(name, tmp_path):
    problem_class = problems.get_class(name)
    settings = models.preset_hyperparameters(problem_class.default_hparams_set)
    options = problem_class.options_for(settings)
    problem = problems.get(name, data_dir=str(tmp_path), **options)
    problem.check_hyperparameters(settings)
    assert problem.sequence_length <= settings.max_sequence_length


def test_unknown_name_lists_the_problems(clean_registry):
    problems.register("zeros")(make_class())
    with pytest.raises(ValueError) as error:
        problems.get("enwik")
    message = str(error.value)
    assert "name='enwik'" in message
    assert "zeros: Nothing but zeros." in message
    assert "python_source: The source code of" in message
    assert "More about them" not in message


def test_a_name_is_taken_once(clean_registry):
    first = problems.register("zeros")(make_class())
    problems.register("zeros")(make_class())  # a newer version of the same class
    with pytest.raises(ValueError, match="`name`.*name='zeros'"):
        problems.register("zeros")(problems.TextFiles)
    with pytest.raises(ValueError, match="name='ones'"):
        problems.register("ones")(dict)
    assert problems.get("zeros").name == first.name
    assert problems.TextFiles.name == "text_files"


@pytest.mark.parametrize(
    "name, length",
    [
        ("enwik8_length8k", 8192),
        ("enwik8_length12k", 12288),
        ("wikitext103_length4k", 4096),
        ("wikitext103_length2k", 2048),
        ("wikitext103_length1k", 1024),
    ],
)
def test_lengths_in_names(name, length):
    assert problems.get(name).sequence_length == length


SHORTEST = "min_training_length"
PARALLEL = {"source_files": "a", "target_files": "b"}


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("python_source", {"length": 3}, r"'sequence_length'.*\['length'\]"),
        *(
            ("python_source", {"sequence_length": length}, "`sequence_length`.*=")
            for length in (0, "-1", "ten", 2.5, True)
        ),
        *(
            ("text_files", {"sequence_length": 16, SHORTEST: length}, f"`{SHORTEST}`")
            for length in (0, 17, "many")
        ),
        ("python_source", {"train_split": "valid"}, "`train_split`.*='valid'"),
        ("python_source", {"eval_split": "valid"}, "`eval_split`.*eval_split='valid'"),
        ("python_source", {"packing": "tight"}, "`packing`.*packing='tight'"),
        ("text_files", {}, "`files`.*files=None"),
        ("enwik8", {"form": "text"}, "`form`.*form='text'"),
        (
            "enwik8",
            {"form": "bytes", "packing": "release"},
            "`packing='release'`.*form='bytes'",
        ),
        ("wikitext103", {"level": "characters"}, "`level`.*level='characters'"),
        ("wikitext103", {"form": "cooked"}, "`form`.*form='cooked'"),
        (
            "wikitext103",
            {"level": "bytes", "packing": "release"},
            "`packing='release'`.*level='bytes'",
        ),
        ("parallel_files", {}, "`source_files`.*`target_files`.*None.*None"),
        ("parallel_files", {"source_files": "a"}, "`source_files`.*'a'.*None"),
        (
            "parallel_files",
            {**PARALLEL, "test_source_files": "c"},
            "`test_source_files`.*`test_target_files`.*'c'",
        ),
        ("parallel_files", {**PARALLEL, "vocabulary": "subwords"}, "`data_dir`.*=None"),
        ("parallel_files", {**PARALLEL, "input_length": 0}, "`input_length`.*=0"),
        ("parallel_files", {**PARALLEL, "too_long": "keep"}, "too_long='keep'"),
        ("parallel_files", {**PARALLEL, SHORTEST: 4}, f"{SHORTEST}=4"),
        ("translate_ende_wmt14", {"document": "perhaps"}, "document='perhaps'"),
        ("image_folder", {}, "`folder`.*folder=None"),
        ("image_folder", {"folder": "a", "channels": 2}, "channels=2"),
        ("image_folder", {"folder": "a", "height": 0}, "`height`.*height=0"),
        ("image_folder", {"folder": "a", "resize": "yes"}, "resize='yes'"),
        ("digits", {"sequence_length": "2048"}, "Received: sequence_length=2048"),
    ],
)
def test_refused_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        problems.get(name, **options)

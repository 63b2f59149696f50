import numpy as np
import pytest

from routing_tf import models
from routing_tf import problems
from routing_tf.cli import known_names
from routing_tf.files.splits import SPLITS
from routing_tf.problems import registry


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
    "name", [name for name in known_names.PROBLEMS if name not in OF_FILES]
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


def test_unknown_option_lists_the_options():
    with pytest.raises(ValueError, match=r"'sequence_length'.*\['length'\]"):
        problems.get("python_source", length=3)


def test_a_name_is_taken_once(clean_registry):
    first = problems.register("zeros")(make_class())
    problems.register("zeros")(make_class())  # a newer version of the same class
    with pytest.raises(ValueError, match="must not be taken by another problem"):
        problems.register("zeros")(problems.TextFiles)
    assert problems.get("zeros").name == first.name
    assert problems.TextFiles.name == "text_files"


@pytest.mark.parametrize("length", [0, "-1", "ten", 2.5, True])
def test_sequence_length_is_checked(length):
    with pytest.raises(ValueError, match="`sequence_length` must be a positive"):
        problems.get("python_source", sequence_length=length)

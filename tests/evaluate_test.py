import dataclasses
import functools
import math
import re

import numpy as np
import pytest

from routing_tf.cli import evaluate
from routing_tf.models.scoring import Score
from routing_tf.training import checkpoints
from routing_tf.training import evaluation
from routing_tf.training import loading
from routing_tf.training import run_folder
from tests import runs
from tests import small_problems

pytestmark = pytest.mark.usefixtures("eager", "loaded_once")

HPARAMS = f"{runs.HPARAMS},num_routed_heads=1"


@pytest.fixture
def other(tmp_path):
    """A file that the run does not know."""
    path = tmp_path / "other.txt"
    path.write_bytes(b"abcd" * 500)
    return path


@pytest.fixture(scope="module")
def model_dir(text, tmp_path_factory):
    """The folder of a run."""
    h = runs.settings(f"{HPARAMS},routing=expert_choice")
    options = {"step": 3, "problem_options": {"files": str(text)}}
    return runs.saved(tmp_path_factory.mktemp("run"), "text_files", h, **options)


@pytest.fixture
def run(works):
    return functools.partial(works, evaluate)


def test_the_scope_of_sampling(model_dir, run):
    options = [f"--model_dir={model_dir}", "--split=validation", "--eval_examples=5"]
    scored = {}
    for scope in ("full", "prefix"):
        out = run(*options, f"--routing_scope={scope}")
        scored[scope] = out.splitlines()[-1]
        assert ("WARNING: later tokens take part" in out) == (scope == "full")
    assert "step-3" in out and "validation: 160 tokens scored" in out
    assert 'routing scope "prefix": every token only from those before it' in out
    assert scored["full"] != scored["prefix"]


def test_the_whole_test_split_is_the_default(model_dir, run):
    out = run(f"--model_dir={model_dir}")
    # 5 % of the bytes and the end id
    assert "test: 201 tokens scored" in out


def test_other_data(model_dir, other, run):
    options = [f"--model_dir={model_dir}", f"--files={other}"]
    out = run(*options)
    assert "files: 1, none of the run; scored whole\n" in out
    assert "test: 2,001 tokens scored" in out
    for flag in ("--split", "--eval_split"):
        assert "test: 101 tokens scored" in run(*options, f"{flag}=test")


def test_files_of_the_run_are_never_scored_whole(model_dir, tmp_path, other, run):
    own = run_folder.RunConfig.load(model_dir).problem_options["files"]
    (tmp_path / "link.txt").symlink_to(own)
    (tmp_path / "hard.txt").hardlink_to(own)
    for name in (own, tmp_path / "link.txt", tmp_path / "hard.txt"):
        out = run(f"--model_dir={model_dir}", f"--files={name}")
        assert "files: 1 of 1 belong to the run, so they are split as for" in out
        assert "test: 201 tokens scored" in out
        assert "trained on these files" not in out
    out = run(f"--model_dir={model_dir}", f"--files={own},{other}")
    assert "files: 1 of 2 belong to the run" in out
    assert "WARNING: the run may have been trained on these files" in out


@pytest.mark.parametrize(
    "ending", ["", pytest.param(".index", marks=pytest.mark.thorough)]
)
def test_a_checkpoint_of_a_run(ending, model_dir, run, refused):
    checkpoint = checkpoints.paths(model_dir)[-1]
    for more in (["--checkpoint=best"], ["--checkpoint=best", f"--texts={__file__}"]):
        said = refused(evaluate, f"--model_dir={checkpoint}", *more)
        assert "`--checkpoint` chooses among those of a run" in said
    out = run(f"--model_dir={checkpoint}{ending}", "--eval_examples=2")
    assert f"model: {checkpoint}\n" in out


def test_changed_data(model_dir, refused, monkeypatch):
    """Also for the test split, which a run does not use."""
    problem_class = type(run_folder.RunConfig.load(model_dir).make_problem())
    encode = problem_class.encode
    monkeypatch.setattr(problem_class, "encode", lambda *text: encode(*text)[::-1])
    said = refused(evaluate, f"--model_dir={model_dir}")
    assert "data of the split 'validation' must be the one that the run used" in said


def test_larger_vocabulary(model_dir, refused, monkeypatch):
    problem_class = type(run_folder.RunConfig.load(model_dir).make_problem())
    monkeypatch.setattr(problem_class, "vocabulary_size", 300)
    said = refused(evaluate, f"--model_dir={model_dir}")
    assert "300 ids of text_files, 258 of the model" in said


@pytest.fixture(scope="module")
def words_dir(tmp_path_factory):
    """The folder of a run whose metric is the perplexity per word."""
    folder = tmp_path_factory.mktemp("words")
    return runs.saved(folder, "test_words", runs.settings(HPARAMS))


def test_no_other_split_is_loaded(words_dir, run, refused, monkeypatch):
    monkeypatch.setattr(small_problems.Words, "missing", {"train", "validation"})
    out = run(f"--model_dir={words_dir}")
    assert "data: test_words: test 300 ids" in out
    (nats,) = re.findall(r"test: 300 tokens scored, (.*) nats per token", out)
    name, _, value = out.splitlines()[-1].partition(": ")
    assert name == "held-out perplexity per word"
    assert float(value) == pytest.approx(math.exp(5 * float(nats)), rel=1e-3)
    said = refused(evaluate, f"--model_dir={words_dir}", "--eval_split=validation")
    assert said == "The files of 'validation' are missing"


def test_the_split_that_was_trained_on(words_dir, run):
    out = run(f"--model_dir={words_dir}", "--eval_split=train", "--eval_examples=3")
    assert "train (not held out: the split that is trained on): 96 tokens" in out


@pytest.fixture
def texts(tmp_path):
    """Two files, the first of several windows."""
    (tmp_path / "a.txt").write_text("a bad cab, " * 7, encoding="utf-8")
    (tmp_path / "b.txt").write_text("é", encoding="utf-8")
    return tmp_path / "*.txt"


def test_texts(model_dir, texts, run):
    out = run(f"--model_dir={model_dir}", f"--texts={texts}")
    lines = out.splitlines()
    checkpoint = checkpoints.paths(model_dir)[-1]
    lm = loading.load_language_model(checkpoint)
    text = ("a bad cab, " * 7).encode()
    ids = np.frombuffer(text, "uint8").astype("int32") + 2
    windows = [ids[start : start + 32] for start in range(0, len(ids), 32)]
    nats = [
        -sum(each.log_likelihood for each in lm.score(rows))
        for rows in (windows, [np.frombuffer("é".encode(), "uint8") + np.int32(2)])
    ]
    bits = [nats[0] / 77 / math.log(2), sum(nats) / 79 / math.log(2)]
    assert f"a.txt: 77 tokens, {bits[0]:.4f} bits per byte" in lines[1]
    assert f"perplexity {math.exp(nats[0] / 77):,.4f} per token" in lines[1]
    assert lines[1].endswith("per word (21 words)")
    assert "b.txt: 2 tokens" in lines[2]
    assert lines[3].startswith("total: 79 tokens")
    assert lines[3].endswith(f"{math.exp(sum(nats) / 22):,.4f} per word (22 words)")
    assert lines[4].startswith('routing scope "full": WARNING: later tokens')
    assert lines[5:] == [f"held-out bits per byte: {bits[1]:.4f}"]


def test_a_total_per_word_needs_words_in_all_texts(model_dir, texts, run):
    texts.with_name("c.txt").write_text("\n", encoding="utf-8")
    lines = run(f"--model_dir={model_dir}", f"--texts={texts}").splitlines()
    assert "word, as not every text has one; --num_words gives" in lines[4]


def test_texts_from_prefixes_of_a_saved_model(model_dir, texts, run):
    checkpoint = checkpoints.paths(model_dir)[-1]
    out = run(
        f"--model_dir={checkpoint}",
        f"--texts={texts.with_name('b.txt')}",
        "--routing_scope=prefix",
        "--num_words=5",
    )
    assert "(5 words)" in out
    assert 'routing scope "prefix": every token only from those before it' in out
    assert out.splitlines()[-1].startswith("held-out bits per byte: ")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("b.txt", b"", "`--texts` must name a file that is not empty"),
        ("c.txt", b"abc", "`--texts` must name existing files"),
        ("*.txt", b"\xe4", "`--texts` must be text in UTF-8. Received: .*b.txt"),
        ("*.txt", b"\x1f\x8b\x08", "`--texts` must be readable. Received: .*b.txt"),
    ],
)
def test_texts_that_cannot_be_scored(
    model_dir, tmp_path, refused, name, content, message
):
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes(content)
    texts = f"--texts={tmp_path / name}"
    # All are read before any is scored.
    quiet = name == "*.txt"
    said = refused(evaluate, f"--model_dir={model_dir}", texts, quiet=quiet)
    assert re.search(message, said)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([f"--texts={__file__}", "--problem=digits"], "Received also: --problem"),
        ([f"--texts={__file__}", "--split=test", "--eval_examples=3"], "--split, --ev"),
        (["--num_words=7"], "is for `--texts`"),
        (["--problem=enwik"], "text_files"),
    ],
)
def test_flags_that_do_not_fit(model_dir, refused, arguments, message):
    assert message in refused(evaluate, f"--model_dir={model_dir}", *arguments)


def test_a_model_without_a_run(tmp_path, refused):
    path = tmp_path / "model.keras"
    path.touch()
    message = f"a model without a run needs `--texts`. Received: '{path}'"
    assert message in refused(evaluate, f"--model_dir={path}")


BOTH = "perplexity {0} per token, {0} per word (1 words)"


@pytest.mark.parametrize(
    "likelihoods, num_words, ending",
    [
        ([-math.log(12920.41284)], 1, BOTH.format("12,920.4128")),
        ([-math.log(9.38e8)], 1, BOTH.format("938,000,000.0000")),
        ([-1e4], 1, ", more than 1e+308 per word (1 words)"),
        ([-4.0] * 240, 1, "as spaces do not part the words"),
        ([-4.0] * 240, 60, "(60 words)"),
    ],
)
def test_what_is_told_of_a_text(likelihoods, num_words, ending):
    size, likelihoods = len(likelihoods), np.array(likelihoods)
    ids, offsets = np.ones(size, "int32"), np.zeros((size, 2), int)
    score = Score(likelihoods, ids, None, offsets, "full", 0, size, num_words)
    assert evaluation.describe_score("a.txt", score).endswith(ending)
    unknown = dataclasses.replace(score, num_unknown=size)
    told = evaluation.describe_score("a.txt", unknown)
    assert "100.00% of them words that the vocabulary does not have, perp" in told
    assert "held-out perplexity per token" in evaluation.final_line_of_texts(unknown)

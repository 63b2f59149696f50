import functools
import io
import json
import signal
import sys

import keras
import keras_hub
import numpy as np
import pytest
from absl import flags

from routing_tf import models
from routing_tf.cli import generate
from routing_tf.cli import train
from routing_tf.generation import display
from routing_tf.generation import texts
from routing_tf.problems import image
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.training import loading
from routing_tf.training import run_folder
from tests import command_line
from tests import runs
from tests import small_problems as small_problems
from tests.models import small_models

pytestmark = pytest.mark.usefixtures("eager", "loaded_once")

SMALL = {
    **models.hyperparameters.parse_overrides(runs.HPARAMS),
    "vocabulary_size": 258,
    "max_sequence_length": 16,
    "num_routed_heads": 0,  # no command asks about the heads
}
GREEDY = "--sampler=greedy"


@pytest.fixture
def run(works):
    return functools.partial(works, generate)


def text_model(path, **changes):
    """Saves a language model whose texts are ASCII, and returns its path."""
    changes = {**SMALL, **changes}
    backbone = models.RoutingTransformer.from_preset("byte_tiny", **changes)
    lm = models.RoutingTransformerCausalLM(
        backbone, models.RoutingTransformerCausalLMPreprocessor(ByteTokenizer())
    )
    return save_writer(lm, path)


def save_writer(lm, path, end=-100.0):
    """Makes a model write ASCII, and saves it; `end` is the logit of the end id."""
    small_models.randomize(lm, 0)
    bias = np.full(258, -100.0)
    bias[2 + ord("a") : 2 + ord("z")] = 0
    bias[1] = end
    lm.logits_dense.bias.assign(bias)
    lm.save(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("model") / "model.keras")


def by_generate(model, sampler, prompts, **options):
    lm = loading.load_language_model(model)
    lm.compile(sampler=sampler)
    return lm.generate(prompts, **options)


def test_a_text_is_shown_while_it_is_made(model, tmp_path, run_command, monkeypatch):
    pieces = []
    write = display.Output.write
    monkeypatch.setattr(
        display.Output,
        "write",
        lambda self, text: pieces.append(text) or write(self, text),
    )
    path = tmp_path / "texts.jsonl"
    options = [f"--model_dir={model}", "--prompt=It was", f"--output_file={path}"]
    _, out, err = run_command(generate, *options, GREEDY)
    (expected,) = by_generate(model, "greedy", ["It was"], max_length=16)
    assert out == f"{expected}\n"
    assert len(set(expected)) > 5
    assert [len(piece) for piece in pieces if piece] == [6] + [1] * 9 + [1]
    assert "9 tokens in " in err and "tokens/s" in err
    assert json.loads(path.read_text()) == {
        "prompt": "It was",
        "sample": 0,
        "continuation": expected.removeprefix("It was"),
        "tokens": 9,
        "ended": False,
    }


def test_the_same_seed_gives_the_same_text(model, run_command):
    outs = []
    for seed in ("--seed=1", "--seed=1", "--seed=2"):
        options = [f"--model_dir={model}", seed, "--max_length=12"]
        _, out, err = run_command(generate, *options)
        assert f"seed {seed[-1]}\n" in err
        # 11 tokens behind the leading id.
        assert len(out) == 12
        outs.append(out)
    assert outs[0] == outs[1] != outs[2]


PROMPTS = ["It was", "a", "night", "zwölf"]


def test_a_text_for_each_line_of_standard_input(model, tmp_path, run, monkeypatch):
    content = io.BytesIO("It was\r\na\n\nnight\nzwölf".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    path = tmp_path / "texts.jsonl"
    options = ["--max_length=12", "--batch_size=3", f"--output_file={path}"]
    out = run(f"--model_dir={model}", "--prompt_file=-", GREEDY, *options)
    expected = by_generate(model, "greedy", PROMPTS, max_length=12)
    assert out == "".join(
        f"--- prompt {number}\n{text}\n" for number, text in enumerate(expected, 1)
    )
    texts = [json.loads(line) for line in path.read_text().splitlines()]
    assert [text["prompt"] for text in texts] == PROMPTS
    assert [text["prompt"] + text["continuation"] for text in texts] == expected


def test_samples_of_a_prompt_differ(model, run):
    options = ["--prompt=é", "--num_samples=3", "--seed=1", "--sampler=random"]
    options += ["--max_length=12"]
    out = run(f"--model_dir={model}", *options)
    headers, texts = out.splitlines()[::2], out.splitlines()[1::2]
    assert headers == [f"--- sample {number}" for number in (1, 2, 3)]
    assert len(set(texts)) == 3
    assert all(text.startswith("é") and len(text) == 10 for text in texts)


@pytest.fixture
def ending_model(model, tmp_path):
    """A model that writes "b" or ends a text."""
    lm = keras.saving.load_model(model)
    bias = np.full(258, -100.0)
    bias[[1, 2 + ord("b")]] = 0, -1
    lm.logits_dense.bias.assign(bias)
    lm.logits_dense.kernel.assign(np.zeros(lm.logits_dense.kernel.shape))
    lm.save(tmp_path / "ending.keras")
    return tmp_path / "ending.keras"


def test_a_stream_goes_past_the_trained_length(model, tmp_path, run_command):
    path = tmp_path / "text.txt"
    options = [f"--model_dir={model}", "--prompt=It was", "--stream", GREEDY]
    options += ["--num_tokens=12", f"--output_file={path}"]
    _, out, err = run_command(generate, *options)
    assert path.read_text() == out
    # As many places behind the prompt, and the same tokens there.
    (expected,) = by_generate(model, "greedy", ["It was"], max_length=19)
    assert out == f"{expected}\n"
    assert "12 tokens in" in err


@pytest.mark.parametrize(
    "ways",
    [
        [GREEDY],
        pytest.param(["--sampler=beam", "--num_beams=1"], marks=pytest.mark.thorough),
        [GREEDY, "--stream"],
    ],
)
def test_a_text_ends_where_a_stop_string_begins(ways, model, tmp_path, run):
    options = [f"--model_dir={model}", "--prompt=It was", *ways]
    if "--stream" in ways:
        options.append("--num_tokens=9")
    whole = run(*options)
    text = whole.rstrip("\n").removeprefix("It was")
    stop = text[2:4]
    # What the prompt holds does not count.
    out = run(*options, "--stop=It", f"--stop={stop}")
    assert out.rstrip("\n") == "It was" + text[: text.find(stop)]
    if "--stream" in ways:
        return
    path = tmp_path / "texts.jsonl"
    run(*options, f"--stop={stop}", f"--output_file={path}")
    made = json.loads(path.read_text())
    # A token is a byte, and those of the string are the last.
    assert made["ended"] and made["tokens"] == text.find(stop) + len(stop)


def test_a_stream_ends_at_the_end_id_where_it_shall(ending_model, run, run_command):
    options = [f"--model_dir={ending_model}", "--stream", GREEDY, "--num_tokens=3"]
    assert run(*options) == "\n\n\n"
    _, out, err = run_command(generate, *options, "--stop_at_end")
    assert out == ""
    assert "1 tokens in" in err


def test_a_text_ends_at_the_end_id_unless_told_otherwise(ending_model, run_command):
    options = [f"--model_dir={ending_model}", GREEDY, "--prompt=a", "--max_length=4"]
    for more, expected, number in (([], "a\n", 1), (["--nostop_at_end"], "a\n\n", 2)):
        _, out, err = run_command(generate, *options, *more)
        assert out == expected
        assert f"{number} tokens in" in err


@pytest.mark.parametrize(
    "handler, prompt, out, last",
    [
        (signal.default_int_handler, "", "aaa\n", 3),
        (signal.default_int_handler, "a prompt", "a prompt\n", 3),
        (signal.SIG_IGN, "", "aaaaa\n", 5),
    ],
    ids=["a token", "a prompt", "a shell's background"],
)
def test_an_interrupt_does_not_break_a_step(handler, prompt, out, last, capsys):
    # NumPy and TensorFlow may make another error of an exception that they find.
    done = []

    def stream(prompts):
        for position in range(1, 6):
            if position == 3:
                signal.raise_signal(signal.SIGINT)
            done.append(position)
            yield position, [2 + ord("a")]

    earlier = signal.signal(signal.SIGINT, handler)
    try:
        display.write_stream(stream, texts.TextSample(ByteTokenizer(), prompt))
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert done == list(range(1, last + 1))
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sampler=greedy", "--top_k=3"], "--top_k has no effect with"),
        (["--sampler=greedy", "--temperature=2"], "--temperature has no effect with"),
        (["--top_k=3", "--num_beams=2"], "--num_beams has no effect"),
        (["--temperature=0"], "--temperature=0.0. For the likeliest token"),
        (["--prompt=\udcff"], "`--prompt` must be text in UTF-8"),
        (["--temperature=1e-38"], "must be at least 1e-06, and finite"),
        (["--top_p=1.5"], "at most 1. Received: --top_p=1.5"),
        (["--top_k=300"], "size of the vocabulary, 258. Received: --top_k=300"),
        (["--sampler=contrastive", "--alpha=2"], "--alpha=2.0"),
        (["--prompt=a", f"--prompt_file={__file__}"], "--prompt='a', --prompt_file="),
        ([f"--prompt={'a' * 31}"], "longest has 32 tokens"),
        (["--prompt=abc", "--max_length=4"], "--max_length=4. Pass"),
        (["--output_file=nowhere/a.txt"], "in a folder that exists"),
        (["--num_tokens=3"], "is for `--stream`"),
        (["--stream", "--sampler=beam"], "--sampler=beam, which chooses among whole"),
        (["--stream", "--sampler=contrastive"], "--sampler=contrastive, which"),
        (["--stream", "--num_samples=2"], "2 prompts and samples"),
        (["--stream", "--max_length=9"], "--max_length has no effect with --stream"),
        (["--labels=3"], "with a RoutingTransformerCausalLM"),
        (["--stop="], "`--stop` must not be empty"),
        (["--prompt_file=nowhere"], "`--prompt_file` must exist"),
        (["--num_given_rows=3", "--split=test"], "--num_given_rows, --split have"),
    ],
)
def test_mistakes_are_one_line_on_stderr(model, refused, arguments, message):
    assert message in refused(generate, f"--model_dir={model}", *arguments, quiet=True)


@pytest.mark.parametrize("command", [generate, train])
def test_seeds_out_of_range(command):
    for seed in (-1, 2**32, 10**20):
        with pytest.raises(flags.IllegalFlagValueError, match="--seed=.*4294967295"):
            command_line.parse(command, "--model_dir=m", f"--seed={seed}")


@pytest.mark.parametrize(
    "content, message",
    [(b"", "not empty"), (b"\n\r\n", "not empty"), (b"\xff", "text in UTF-8")],
)
def test_prompt_files_without_prompts(model, tmp_path, refused, content, message):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    arguments = f"--model_dir={model}", f"--prompt_file={path}"
    assert message in refused(generate, *arguments)


def test_models_without_texts(tmp_path, refused):
    path = tmp_path / "ids.keras"
    small_models.language_model().save(path)
    assert "must have a tokenizer" in refused(generate, f"--model_dir={path}")


@pytest.fixture(scope="module")
def pair_model(tmp_path_factory):
    """A model with an encoder that writes ASCII, and its path."""
    settings = {**SMALL, "num_encoder_layers": 1, "max_input_length": 16}
    lm = models.RoutingTransformerSeq2SeqLM(
        models.RoutingTransformerEncoderDecoder(models.Hyperparameters(**settings)),
        models.RoutingTransformerSeq2SeqLMPreprocessor(
            ByteTokenizer(), encoder_sequence_length=16, decoder_sequence_length=8
        ),
    )
    return save_writer(lm, tmp_path_factory.mktemp("pairs") / "model.keras", end=0.5)


@pytest.mark.thorough
def test_a_model_with_an_encoder(pair_model, tmp_path, run):
    prompts, path = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    options = [f"--prompt_file={prompts}", "--batch_size=3", f"--output_file={path}"]
    options += ["--sampler=beam", "--num_beams=2"]
    out = run(f"--model_dir={pair_model}", *options)
    sampler = keras_hub.samplers.BeamSampler(num_beams=2)
    expected = by_generate(pair_model, sampler, PROMPTS)
    assert len(set(expected)) > 1
    # The source is no part of what is shown.
    assert out == "".join(
        f"--- prompt {number}\n{text}" + "\n" * bool(text)
        for number, text in enumerate(expected, 1)
    )
    texts = [json.loads(line) for line in path.read_text().splitlines()]
    assert [text["prompt"] for text in texts] == PROMPTS
    assert [text["continuation"] for text in texts] == expected
    for text in texts:
        assert text["tokens"] == len(text["continuation"]) + text["ended"]
        assert text["ended"] or text["tokens"] == 7


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "needs a source text. Received: an empty prompt"),
        ([f"--prompt={'a' * 16}"], "16 tokens. Received: one of 17 tokens"),
        (["--prompt=a", "--stream"], "--stream has no effect with a R"),
        (["--prompt=a", "--labels=3"], "--labels has no effect with a R"),
    ],
)
def test_mistakes_with_an_encoder(pair_model, refused, arguments, message):
    model = f"--model_dir={pair_model}"
    assert message in refused(generate, model, *arguments, quiet=True)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The folder of a run on images."""
    h = runs.settings(f"{runs.IMAGE_HPARAMS},num_routed_heads=1", "digits_small")
    return runs.saved(tmp_path_factory.mktemp("images"), "test_checkers", h)


def read_picture(path):
    """The images of a grid `[rows, columns, 4, 4]`, in intensities of a picture."""
    pixels = keras.utils.img_to_array(keras.utils.load_img(path))[::8, ::8, 0]
    pixels = np.pad(pixels, ((0, 1), (0, 1)))
    rows, columns = (size // 5 for size in pixels.shape)
    return pixels.reshape(rows, 5, columns, 5).swapaxes(1, 2)[:, :, :4, :4]


@pytest.mark.thorough
def test_samples_of_images(images, tmp_path, run):
    model = loading.load_language_model(images)
    path = tmp_path / "samples.png"
    options = [f"--model_dir={images}", f"--output_file={path}", "--seed=3"]
    run(*options, "--labels=1,0,1", "--num_samples=2")
    sampler = keras_hub.samplers.RandomSampler(seed=3)
    expected = model.generate(labels=[1, 0, 1] * 2, sampler=sampler, verbose=False)
    assert path.read_bytes() == image.picture(expected, 3, 5)
    assert read_picture(path).shape == (2, 3, 4, 4)


@pytest.mark.thorough
def test_completions_of_images(images, tmp_path, run):
    path = tmp_path / "completions.png"
    options = ["--num_given_rows=1", "--num_images=4", "--num_samples=2"]
    options += [f"--output_file={path}", "--split=validation"]
    run(f"--model_dir={images}", *options)
    given, first, second, true = read_picture(path)
    problem = run_folder.RunConfig.load(images).make_problem()
    expected = problem.images("validation")[:4, ..., 0]
    np.testing.assert_array_equal(true, expected.astype("int64") * 255 // 4)
    for each in (given, first, second):
        np.testing.assert_array_equal(each[:, :1], true[:, :1])
    assert (given[:, 1:] == 127).all()
    assert (first[:, 1:] != second[:, 1:]).any()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt=a"], "--prompt has no effect with a Rou"),
        (["--stream", "--max_length=9"], "--max_length, --stream have no effect"),
        (["--output_file=a.txt"], "path of a .png"),
        (["--labels=1,2"], "range [0, 2), separated by commas. Received: --labels=1"),
        (["--labels=three"], "--labels=three"),
        (["--labels=1", "--num_given_rows=2"], "images have their own labels"),
        (["--num_images=3"], "no effect without --num_given_rows"),
        (["--problem=digits"], "no effect without --num_given_rows"),
        (["--num_given_rows=9"], "num_given_rows=9"),
        (["--sampler=beam"], "one token or value after the other"),
    ],
)
def test_mistakes_with_images(images, tmp_path, refused, arguments, message):
    path = f"--output_file={tmp_path / 'a.png'}"
    assert message in refused(generate, f"--model_dir={images}", path, *arguments)
    assert not (tmp_path / "a.png").exists()

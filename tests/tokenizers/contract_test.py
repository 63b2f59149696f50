"""What all tokenizers promise alike; their rules have tests of their own."""

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from routing_tf import models
from routing_tf import tokenizers
from tests import tracing

TEXTS = ["", "the cat", "cat\nmat", "the cat sat on the mat"]
CORPUS = ["the cat sat on the mat , a cat\n"] * 3
SUBWORDS = tokenizers.SubwordTokenizer.build_vocabulary(CORPUS, 60)
WORDS = tokenizers.WordTokenizer.build_vocabulary(CORPUS, newline=True, unknown=True)
CASES = {
    "bytes": (tokenizers.ByteTokenizer, {}),
    "subwords": (tokenizers.SubwordTokenizer, {"vocabulary": SUBWORDS}),
    "words": (tokenizers.WordTokenizer, {"vocabulary": WORDS}),
}
# What two ids outside of the vocabulary become, between a cat and a mat.
OUTSIDE = {
    "bytes": "cat\ufffd\ufffdmat",
    "subwords": "cat mat",
    "words": "cat <unk> <unk> mat",
}


def array(x):
    return keras.ops.convert_to_numpy(x)


def make(case, **options):
    cls, arguments = CASES[case]
    return cls(**arguments, **options)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(case):
    return make(case)


def test_ids_of_texts(tokenizer):
    assert tokenizer.start_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.end_token_id == 1
    assert tokenizer.special_token_ids == [0, 1]
    end = "_" if isinstance(tokenizer, tokenizers.SubwordTokenizer) else ""
    assert tokenizer.special_tokens == [f"<pad>{end}", f"<EOS>{end}"]
    assert tokenizer.encode_batch([]) == []
    with pytest.raises(ValueError, match="Received: texts='the cat'"):
        tokenizer.encode_batch("the cat")
    ids = tokenizer.tokenize(TEXTS)
    assert ids.dtype == tf.int32
    assert tokenizer.detokenize(ids) == TEXTS
    for text, row in zip(TEXTS, ids.to_list(), strict=True):
        for one in (text, text.encode()):
            assert tokenizer.tokenize(one).numpy().tolist() == row
        assert array(tokenizer(text)).dtype == np.int32
        assert tokenizer.detokenize(tokenizer(text)) == text
    for id in range(tokenizer.vocabulary_size()):
        assert tokenizer.token_to_id(tokenizer.id_to_token(id)) == id


def test_detokenize_drops_padding_and_stops_at_the_end_id(case, tokenizer):
    a, b = (tokenizer.tokenize(text).numpy().tolist() for text in ("cat", "mat"))
    both = tokenizer.detokenize([*a, *b])
    for ids, text in [
        ([], ""),
        ([0, *a, 0, *b, 0], both),
        ([*a, 1, *b], "cat"),
        ([1], ""),
        ([*a, tokenizer.vocabulary_size(), -1, *b], OUTSIDE[case]),
    ]:
        assert tokenizer.detokenize(ids) == text
        assert tokenizer.detokenize(np.array(ids, "int64")) == text
        assert tokenizer.detokenize([ids, a]) == [text, "cat"]
    assert tokenizer.detokenize([[], []]) == ["", ""]


def test_sequence_length_cuts_and_pads(case, tokenizer):
    cut = make(case, sequence_length=4)
    ids = array(cut(["", TEXTS[-1], "the"]))
    whole = [tokenizer.tokenize(text).numpy().tolist() for text in (TEXTS[-1], "the")]
    assert len(whole[0]) > 4
    assert ids.tolist() == [[0] * 4, whole[0][:4], (whole[1] + [0] * 4)[:4]]
    one = array(cut("the"))
    np.testing.assert_array_equal(one, ids[2])
    assert cut.detokenize(one) == "the"
    if case == "words":
        assert cut.encode(TEXTS[-1]).tolist() == whole[0]
    with pytest.raises(ValueError, match="`sequence_length`.*sequence_length=0"):
        make(case, sequence_length=0)


@pytest.mark.parametrize(
    "sequence_length", [None, pytest.param(40, marks=pytest.mark.thorough)]
)
def test_in_a_data_pipeline(case, sequence_length):
    tokenizer = make(case, sequence_length=sequence_length)
    single = tf.data.Dataset.from_tensor_slices(TEXTS)
    for dataset in (single, single.batch(2)):
        ids = dataset.map(tokenizer)
        assert ids.element_spec.shape[-1] == sequence_length
        texts = ids.map(tokenizer.detokenize).as_numpy_iterator()
        restored = [text.decode() for row in texts for text in np.atleast_1d(row)]
        assert restored == TEXTS


@pytest.mark.thorough
def test_in_a_saved_model(tokenizer, tmp_path):
    module = tf.Module()
    module.tokenizer = tokenizer
    if keras.backend.backend() != "tensorflow":
        # Only there Keras layers are tracked, with their tables.
        module.table = getattr(tokenizer, "table", None)
    module.tokenize = tf.function(
        lambda texts: tokenizer.tokenize(texts).to_tensor(),
        [tf.TensorSpec((None,), tf.string)],
    )
    rows = tf.TensorSpec((None, None), tf.int32)
    module.detokenize = tf.function(tokenizer.detokenize, [rows])
    tf.saved_model.save(module, tmp_path)
    expected = tokenizer.tokenize(TEXTS).to_tensor().numpy()
    for each in (module, tf.saved_model.load(tmp_path)):
        ids = each.tokenize(tf.constant(TEXTS))
        np.testing.assert_array_equal(ids, expected)
        assert [text.decode() for text in each.detokenize(ids).numpy()] == TEXTS
        assert each.tokenize(tf.constant([], tf.string)).shape == (0, 0)
        assert each.detokenize(tf.zeros((0, 3), tf.int32)).shape == (0,)


def test_serialization(case):
    tokenizer = make(case, sequence_length=7, name="mine")
    config = keras.saving.serialize_keras_object(tokenizer)
    copy = keras.saving.deserialize_keras_object(config)
    assert type(copy) is type(tokenizer)
    assert (copy.sequence_length, copy.name) == (7, "mine")
    assert copy.get_config() == tokenizer.get_config()
    if case == "bytes":
        return
    assert config["config"]["vocabulary"] is None
    for call in (
        copy.get_vocabulary,
        copy.vocabulary_size,
        lambda: copy.tokenize("a"),
        lambda: copy.detokenize([1]),
        *([lambda: copy.encode("a")] if case == "words" else []),
    ):
        with pytest.raises(ValueError, match="`vocabulary`.*vocabulary=None"):
            call()
    copy.set_vocabulary(tokenizer.get_vocabulary())
    assert copy.tokenize("a").shape == (7,)
    config["config"]["vocabulary"] = "/etc/hosts"
    with pytest.raises(ValueError, match="`vocabulary`.*vocabulary='/etc/hosts'"):
        keras.saving.deserialize_keras_object(config)


def test_files(tokenizer, case, tmp_path):
    if case == "bytes":
        pytest.skip("its vocabulary is no file")
    vocabulary, path = tokenizer.get_vocabulary(), tmp_path / "vocabulary"
    tokenizer.save_vocabulary(path)
    content = path.read_bytes()
    quote = "'" if case == "subwords" else ""
    lines = [f"{quote}{token}{quote}\n" for token in vocabulary]
    assert content.decode() == "".join(lines)
    for other in (content, content[:-1], content.replace(b"\n", b"\r\n")):
        path.write_bytes(other)
        for name in (path, str(path)):
            assert type(tokenizer)(name).get_vocabulary() == vocabulary


def test_in_a_preset_folder_and_a_file(case, tmp_path):
    tokenizer = make(case)
    lm = models.RoutingTransformerCausalLM.from_preset(
        "byte_tiny",
        num_layers=1,
        vocabulary_size=tokenizer.vocabulary_size(),
        preprocessor=models.RoutingTransformerCausalLMPreprocessor(
            tokenizer, sequence_length=64
        ),
    )
    lm.save_to_preset(tmp_path / "preset")
    lm.save(tmp_path / "model.keras")
    folder = str(tmp_path / "preset")
    from_preset = models.RoutingTransformerCausalLM.from_preset(folder)
    from_file = keras.saving.load_model(tmp_path / "model.keras")
    alone = models.RoutingTransformerCausalLMPreprocessor.from_preset(folder)
    found = [each.preprocessor.tokenizer for each in (from_preset, from_file)]
    found += [alone.tokenizer, type(tokenizer).from_preset(folder)]
    found.append(keras_hub.tokenizers.Tokenizer.from_preset(folder))
    for copy in found:
        assert type(copy) is type(tokenizer)
        assert copy.get_config() == tokenizer.get_config()
        assert copy.get_vocabulary() == tokenizer.get_vocabulary()
        assert copy.detokenize(copy(TEXTS)) == TEXTS
    with tracing.eager():
        assert from_file.generate("the cat", max_length=11).startswith("the cat")
    other = CASES["words" if case == "bytes" else "bytes"][0]
    names = f"{other.__name__}.*preset=.*{type(tokenizer).__name__}"
    with pytest.raises(ValueError, match=names):
        other.from_preset(folder)


def test_errors_of_vocabularies(tokenizer, case, tmp_path):
    if case == "bytes":
        pytest.skip("it has no vocabulary of its own")
    cls, path = type(tokenizer), tmp_path / "vocabulary"
    with pytest.raises(ValueError, match="`vocabulary`.*Received: .*/vocabulary'"):
        cls(path)
    path.write_bytes(b"")
    for empty in (path, []):
        with pytest.raises(ValueError, match="`vocabulary`.*build_vocabulary"):
            cls(empty)
    tokens = tokenizer.get_vocabulary()
    with pytest.raises(ValueError, match=rf"`vocabulary`.*Received: \[{tokens[1]!r}, "):
        cls(tokens[1:])
    with pytest.raises(ValueError, match=r"`vocabulary`.*Received: \[''\]"):
        cls([*tokens, ""])
    size = {"vocabulary_size": 100} if case == "subwords" else {}
    with pytest.raises(ValueError, match="`texts`.*4"):
        cls.build_vocabulary("text", **size)
    for texts in ([], [""]):
        with pytest.raises(ValueError, match="`texts`.*Received: none"):
            cls.build_vocabulary(texts, **size)


def test_errors_of_calls(tokenizer):
    with pytest.raises(ValueError, match=r"`inputs`.*\(2,\)"):
        tokenizer.tokenize([1, 2])
    with pytest.raises(ValueError, match=r"`inputs`.*\(\)"):
        tokenizer.detokenize(99)
    for id in (-1, tokenizer.vocabulary_size()):
        with pytest.raises(ValueError, match=f"`id`.*id={id}$"):
            tokenizer.id_to_token(id)
    with pytest.raises(ValueError, match="`token`.*token='no such token'"):
        tokenizer.token_to_id("no such token")

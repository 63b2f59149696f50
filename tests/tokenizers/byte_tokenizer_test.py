import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from routing_tf import models
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import WordTokenizer

ALL_BYTES = bytes(range(256))
TEXTS = ["", "abc", "naïve 🙂\r\n", "\ufeffmark\x00zero", "中文\u2028line"]


def rows(ragged):
    return [list(map(int, row)) for row in ragged]


def test_ids_are_those_of_tensor2tensor():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocabulary_size() == 258
    assert tokenizer.pad_token_id == 0
    assert tokenizer.start_token_id == 0
    assert tokenizer.end_token_id == 1
    ids = keras.ops.convert_to_numpy(tokenizer(ALL_BYTES))
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.arange(2, 258))


def test_round_trip_of_texts():
    tokenizer = ByteTokenizer()
    for text in TEXTS:
        ids = tokenizer(text)
        expected = np.frombuffer(text.encode(), "uint8").astype("int32") + 2
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(ids), expected)
        assert tokenizer.detokenize(ids) == text
    assert tokenizer.detokenize(tokenizer(TEXTS)) == TEXTS
    assert rows(tokenizer(TEXTS)) == [[b + 2 for b in t.encode()] for t in TEXTS]
    assert rows(tokenizer([])) == []


def test_sequence_length_cuts_and_pads():
    tokenizer = ByteTokenizer(sequence_length=4)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(tokenizer(["abcdef", "", "xy"])),
        [[99, 100, 101, 102], [0, 0, 0, 0], [122, 123, 0, 0]],
    )
    one = tokenizer("xy")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), [122, 123, 0, 0])
    assert tokenizer.detokenize(one) == "xy"


@pytest.mark.parametrize(
    "ids, text",
    [
        ([], ""),
        ([0, 99, 0, 100, 0], "ab"),
        ([99, 1, 100], "a"),
        ([1], ""),
        ([99, 257, 100], "a\ufffdb"),
        ([99, 0xE2 + 2, 0x82 + 2], "a\ufffd"),
        ([99, 300, -7], "a\ufffd\ufffd"),
    ],
)
def test_detokenize_drops_padding_and_stops_at_the_end_id(ids, text):
    tokenizer = ByteTokenizer()
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.detokenize(np.array(ids, "int64")) == text
    assert tokenizer.detokenize([ids, [99]]) == [text, "a"]


def test_detokenize_replaces_whatever_is_not_utf8():
    ids = np.arange(2, 258)
    assert ByteTokenizer().detokenize(ids) == ALL_BYTES.decode(errors="replace")


@pytest.mark.parametrize("sequence_length", [None, 16])
def test_in_a_data_pipeline(sequence_length):
    tokenizer = ByteTokenizer(sequence_length=sequence_length)
    single = tf.data.Dataset.from_tensor_slices(TEXTS)
    for dataset in (single, single.batch(2)):
        ids = dataset.map(tokenizer)
        assert ids.element_spec.shape[-1] == sequence_length
        restored = [
            text.decode()
            for texts in ids.map(tokenizer.detokenize).as_numpy_iterator()
            for text in np.atleast_1d(texts)
        ]
        assert restored == TEXTS


def test_in_a_saved_model(tmp_path):
    module = tf.Module()
    module.tokenizer = ByteTokenizer()
    text_spec = tf.TensorSpec((None,), tf.string)
    ids_spec = tf.TensorSpec((None, None), tf.int32)
    module.tokenize = tf.function(
        lambda texts: module.tokenizer.tokenize(texts).to_tensor(), [text_spec]
    )
    module.detokenize = tf.function(module.tokenizer.detokenize, [ids_spec])
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    ids = loaded.tokenize(tf.constant(TEXTS))
    assert [text.decode() for text in loaded.detokenize(ids).numpy()] == TEXTS
    invalid = loaded.detokenize(tf.constant([[257, 99, 1, 99]]))
    assert invalid.numpy()[0].decode() == "\ufffda"


def test_serialization():
    tokenizer = ByteTokenizer(sequence_length=7, name="bytes")
    config = keras.saving.serialize_keras_object(tokenizer)
    copy = keras.saving.deserialize_keras_object(config)
    assert isinstance(copy, ByteTokenizer)
    assert copy.sequence_length == 7
    assert copy.get_config() == tokenizer.get_config()


def test_tokens_have_names():
    tokenizer = ByteTokenizer()
    vocabulary = tokenizer.get_vocabulary()
    assert len(vocabulary) == 258
    assert vocabulary["a"] == tokenizer.token_to_id("a") == 99
    for id in range(258):
        assert tokenizer.token_to_id(tokenizer.id_to_token(id)) == id
    assert tokenizer.special_token_ids == [0, 1]
    assert tokenizer.special_tokens == ["<pad>", "<EOS>"]


def test_with_the_preprocessor_of_keras_hub():
    preprocessor = keras_hub.models.CausalLMPreprocessor(
        ByteTokenizer(), sequence_length=6
    )
    inputs, targets, _ = preprocessor(["abc"])
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(inputs["token_ids"]), [[0, 99, 100, 101, 1, 0]]
    )
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(targets), [[99, 100, 101, 1, 0, 0]]
    )
    prompt = preprocessor.generate_preprocess(["abc"])
    assert preprocessor.generate_postprocess(prompt) == ["abc"]


@pytest.mark.parametrize("sequence_length", [None, 7])
def test_in_a_preset_folder(sequence_length, tmp_path):
    tokenizer = ByteTokenizer(sequence_length=sequence_length)
    preprocessor = models.RoutingTransformerCausalLMPreprocessor(
        tokenizer, sequence_length=10
    )
    models.RoutingTransformerCausalLM.from_preset(
        "byte_tiny", num_layers=1, preprocessor=preprocessor
    ).save_to_preset(tmp_path)
    loaded = models.RoutingTransformerCausalLMPreprocessor.from_preset(str(tmp_path))
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    assert loaded.tokenizer.get_config() == tokenizer.get_config()
    for text in TEXTS:
        assert loaded.tokenizer.detokenize(loaded.tokenizer(text)) == (
            tokenizer.detokenize(tokenizer(text))
        )
    for cls in (ByteTokenizer, keras_hub.tokenizers.Tokenizer):
        alone = cls.from_preset(str(tmp_path))
        assert isinstance(alone, ByteTokenizer)
        assert alone.get_config() == tokenizer.get_config()
    with pytest.raises(ValueError, match="must be a WordTokenizer.*a ByteTokenizer"):
        WordTokenizer.from_preset(str(tmp_path))


def test_errors():
    with pytest.raises(ValueError, match="`sequence_length` must be a positive"):
        ByteTokenizer(sequence_length=0)
    with pytest.raises(ValueError, match="`inputs` must be one string"):
        ByteTokenizer().tokenize([1, 2])
    with pytest.raises(ValueError, match="`inputs` must be ids of shape"):
        ByteTokenizer().detokenize(99)
    with pytest.raises(ValueError, match="`id` must be between 0 and 257"):
        ByteTokenizer().id_to_token(258)
    with pytest.raises(ValueError, match="`token` must be one of"):
        ByteTokenizer().token_to_id("ab")

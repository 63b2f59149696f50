import keras
import numpy as np

from routing_tf.tokenizers import ByteTokenizer

ALL_BYTES = bytes(range(256))


def test_ids_are_those_of_tensor2tensor():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocabulary_size() == 258
    ids = keras.ops.convert_to_numpy(tokenizer(ALL_BYTES))
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.arange(2, 258))


def test_detokenize_replaces_whatever_is_not_utf8():
    ids = np.arange(2, 258)
    assert ByteTokenizer().detokenize(ids) == ALL_BYTES.decode(errors="replace")


def test_tokens_have_names():
    tokenizer = ByteTokenizer()
    vocabulary = tokenizer.get_vocabulary()
    assert len(vocabulary) == 258
    assert vocabulary["a"] == tokenizer.token_to_id("a") == 99

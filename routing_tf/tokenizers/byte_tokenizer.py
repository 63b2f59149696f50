"""Bytes as tokens, numbered as in tensor2tensor's byte encoder."""

import keras
import numpy as np
import tensorflow as tf

from routing_tf.tokenizers.base_tokenizer import PAD_ID as PAD_ID
from routing_tf.tokenizers.base_tokenizer import BaseTokenizer
from routing_tf.tokenizers.base_tokenizer import Vocabulary

BYTE_OFFSET = 2
NUM_IDS = BYTE_OFFSET + 256

_SPECIAL_TOKENS = ("<pad>", "<EOS>")
# No UTF-8 text contains the byte 255, so it is always decoded as U+FFFD.
_INVALID_BYTE = b"\xff"


@keras.saving.register_keras_serializable(package="routing_tf")
class ByteTokenizer(BaseTokenizer):
    """Splits text into UTF-8 bytes, with ids as in tensor2tensor.

    Id 0 is padding, id 1 ends a text and byte `b` has id `b + 2`, so there are 258 ids;
    there is no vocabulary file. The tokens of bytes are `chr(byte)`. `detokenize` turns
    bytes that are not valid UTF-8, and ids outside of the vocabulary, into U+FFFD.

    As in every `keras_hub` tokenizer, `tokenizer(inputs)` called eagerly gives tensors
    of the Keras backend, or lists for ragged results; `tokenizer.tokenize(inputs)`
    always gives TensorFlow tensors, in a `tf.data` pipeline and in a SavedModel, too.

    Args:
        sequence_length: integer, or `None` (the default) for results as long as the
            text. If given, every text is cut, or padded with id 0, to this many ids.
        **kwargs: arguments of `keras_hub.tokenizers.Tokenizer`, such as `name`.

    Example:
    ```python
    from routing_tf import tokenizers

    tokenizer = tokenizers.ByteTokenizer()
    tokenizer(["ab", ""])  # [[99, 100], []]
    tokenizer.detokenize([99, 100, 1, 101])  # "ab": it stops at the end id
    tokenizers.ByteTokenizer(sequence_length=4)(["ab"])  # [[99, 100, 0, 0]]
    ```
    """

    _vocabulary = Vocabulary([*_SPECIAL_TOKENS, *map(chr, range(256))])

    def ids_of(self, texts):
        # Decodes the joined texts at once, because decode_raw needs equal lengths.
        values = tf.io.decode_raw(tf.strings.reduce_join(texts), tf.uint8)
        return tf.RaggedTensor.from_row_lengths(
            tf.cast(values, tf.int32) + BYTE_OFFSET, tf.strings.length(texts)
        )

    def encode(self, text):
        """Returns all ids of a text, `<uint16>[bytes]`, whatever `sequence_length`."""
        ids = np.frombuffer(tf.compat.as_bytes(text), "uint8").astype("uint16")
        ids += BYTE_OFFSET
        return ids

    def texts_of(self, ids, is_text):
        is_byte = (ids >= BYTE_OFFSET) & (ids < NUM_IDS)
        all_bytes = tf.constant([bytes([value]) for value in range(256)])
        characters = tf.gather(all_bytes, tf.where(is_byte, ids - BYTE_OFFSET, 0))
        characters = tf.where(is_byte, characters, _INVALID_BYTE)
        texts = tf.strings.reduce_join(tf.where(is_text, characters, b""), axis=-1)
        return tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")

    def get_vocabulary(self):
        """Returns a dictionary from token to id; see `id_to_token`."""
        return dict(self._vocabulary.ids)

    def token_to_id(self, token):
        """Returns the id of a token; the inverse of `id_to_token`."""
        if token not in self._vocabulary.ids:
            raise ValueError(
                f"`token` must be one of {_SPECIAL_TOKENS} or one character that "
                f"stands for a byte, chr(0) to chr(255). Received: token={token!r}"
            )
        return self._vocabulary.ids[token]

    def save_assets(self, dir_path):
        """Saves nothing: there is no vocabulary file."""

    def load_preset_assets(self, preset):
        """Loads nothing: there is no vocabulary file."""

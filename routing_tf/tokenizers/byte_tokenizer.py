"""Bytes as tokens, numbered as tensor2tensor's byte encoder numbers them."""

import keras
import numpy as np
import tensorflow as tf

from routing_tf.tokenizers.preset_tokenizer import PresetTokenizer

PAD_ID = 0
END_ID = 1
BYTE_OFFSET = 2
NUM_IDS = BYTE_OFFSET + 256

_SPECIAL_TOKENS = ("<pad>", "<EOS>")
# No UTF-8 text holds the byte 255, so it is always decoded as U+FFFD.
_INVALID_BYTE = b"\xff"


@keras.saving.register_keras_serializable(package="routing_tf")
class ByteTokenizer(PresetTokenizer):
    """Splits text into UTF-8 bytes, with ids as in tensor2tensor.

    Id 0 is padding, id 1 ends a text and byte `b` has id `b + 2`, which makes
    258 ids; nothing is learned, so there is no vocabulary file. Only plain
    TensorFlow operations are used: the same object works on Python strings, in
    a `tf.data` pipeline and in a SavedModel.

    As in every `keras_hub` tokenizer, `tokenizer(inputs)` called eagerly gives
    tensors of the Keras backend, or lists for ragged results, while
    `tokenizer.tokenize(inputs)` always gives TensorFlow tensors.

    Args:
        sequence_length: integer, or `None` (the default) for results as long as
            the text. If given, every text is cut, or padded with id 0, to this
            many ids.
        **kwargs: arguments of `keras_hub.tokenizers.Tokenizer`, such as `name`.

    Raises:
        ValueError: if `sequence_length` is not a positive integer.

    Example:
    ```python
    from routing_tf import tokenizers

    tokenizer = tokenizers.ByteTokenizer()
    tokenizer(["ab", ""])  # [[99, 100], []]
    tokenizer.detokenize([99, 100, 1, 101])  # "ab": it stops at the end id
    tokenizers.ByteTokenizer(sequence_length=4)(["ab"])  # [[99, 100, 0, 0]]
    ```
    """

    def __init__(self, sequence_length=None, **kwargs):
        super().__init__(**kwargs)
        is_integer = isinstance(sequence_length, (int, np.integer))
        if sequence_length is not None and not (is_integer and sequence_length > 0):
            raise ValueError(
                "`sequence_length` must be a positive integer, or None for results "
                f"as long as the text. Received: sequence_length={sequence_length!r}"
            )
        self.sequence_length = sequence_length
        # The model's sequences start behind a leading 0, as in the release.
        self.start_token_id = PAD_ID
        self.pad_token_id = PAD_ID
        self.end_token_id = END_ID

    def tokenize(self, inputs):
        """Turns texts into ids.

        Args:
            inputs: a string, or a batch of strings `[batch]`: Python
                `str` or `bytes`, a list of them, or a string tensor.

        Returns:
            TensorFlow tensors of ids. For one string a dense one, `<int32>[bytes]`;
            for a batch a ragged one, `<int32>[batch, None]`. With `sequence_length`,
            dense ones, `[sequence_length]` and `[batch, sequence_length]`.

        Raises:
            ValueError: if `inputs` are not strings, or of another rank.
        """
        texts = tf.convert_to_tensor(inputs)
        if texts.dtype != tf.string or texts.shape.rank not in (0, 1):
            raise ValueError(
                "`inputs` must be one string or a batch of strings of rank 1. "
                f"Received: inputs of dtype {texts.dtype.name}, shape {texts.shape}"
            )
        batch = tf.reshape(texts, (-1,))
        # One decoding of the joined texts: decode_raw itself wants equal lengths.
        values = tf.io.decode_raw(tf.strings.reduce_join(batch), tf.uint8)
        ids = tf.RaggedTensor.from_row_lengths(
            tf.cast(values, tf.int32) + BYTE_OFFSET, tf.strings.length(batch)
        )
        if self.sequence_length is not None:
            shape = (texts.shape[0] if texts.shape.rank else 1, self.sequence_length)
            ids = ids.to_tensor(PAD_ID, shape=shape)
        return ids if texts.shape.rank else ids[0]

    def detokenize(self, inputs):
        """Turns ids back into text.

        Padding is dropped, a text stops at its first end id, and bytes that are
        not valid UTF-8, like ids outside of the vocabulary, become U+FFFD.

        Args:
            inputs: integer ids `[length]` or `[batch, length]`: lists,
                also of different lengths, arrays, tensors or ragged tensors.

        Returns:
            A `str`, or a list of `str` for a batch; inside of a `tf.function` or
            a `tf.data` pipeline a string tensor `[]` or `[batch]`.

        Raises:
            ValueError: if `inputs` have neither rank 1 nor rank 2.
        """
        ids = dense_ids(inputs)
        if ids.shape.rank not in (1, 2):
            raise ValueError(
                "`inputs` must be ids of shape (length,) or (batch, length). "
                f"Received: inputs of shape {ids.shape}"
            )
        is_end = tf.cast(ids == END_ID, tf.int32)
        is_text = (tf.cumsum(is_end, axis=-1) == 0) & (ids != PAD_ID)
        is_byte = (ids >= BYTE_OFFSET) & (ids < NUM_IDS)
        all_bytes = tf.constant([bytes([value]) for value in range(256)])
        characters = tf.gather(all_bytes, tf.where(is_byte, ids - BYTE_OFFSET, 0))
        characters = tf.where(is_byte, characters, _INVALID_BYTE)
        texts = tf.strings.reduce_join(tf.where(is_text, characters, b""), axis=-1)
        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
        if not tf.executing_eagerly():
            return texts
        texts = texts.numpy()
        if isinstance(texts, bytes):
            return texts.decode("utf-8")
        return [text.decode("utf-8") for text in texts]

    def vocabulary_size(self):
        """Returns the number of ids, 258."""
        return NUM_IDS

    def get_vocabulary(self):
        """Returns a dictionary from token to id; see `id_to_token`."""
        return {self.id_to_token(id): id for id in range(NUM_IDS)}

    def id_to_token(self, id):
        """Returns the token of an id: `"<pad>"`, `"<EOS>"` or `chr(byte)`."""
        if not 0 <= id < NUM_IDS:
            raise ValueError(
                f"`id` must be between 0 and {NUM_IDS - 1}. Received: id={id}"
            )
        return _SPECIAL_TOKENS[id] if id < BYTE_OFFSET else chr(id - BYTE_OFFSET)

    def token_to_id(self, token):
        """Returns the id of a token; the inverse of `id_to_token`."""
        if token in _SPECIAL_TOKENS:
            return _SPECIAL_TOKENS.index(token)
        if len(token) != 1 or ord(token) > 255:
            raise ValueError(
                f"`token` must be one of {_SPECIAL_TOKENS} or one character that "
                f"stands for a byte, chr(0) to chr(255). Received: token={token!r}"
            )
        return ord(token) + BYTE_OFFSET

    @property
    def special_tokens(self):
        """The tokens that stand for no byte."""
        return list(_SPECIAL_TOKENS)

    @property
    def special_token_ids(self):
        """The ids that stand for no byte."""
        return list(range(BYTE_OFFSET))

    def save_assets(self, dir_path):
        """Saves nothing: there is no vocabulary file."""

    def load_preset_assets(self, preset):
        """Loads nothing: there is no vocabulary file."""

    def get_config(self):
        return {**super().get_config(), "sequence_length": self.sequence_length}


def dense_ids(inputs):
    """Ids of any accepted kind as a dense int32 tensor, filled up with padding."""
    if isinstance(inputs, (list, tuple)):
        rows = [np.asarray(row).tolist() for row in inputs]
        inputs = tf.ragged.constant(rows, dtype=tf.int32)
    if isinstance(inputs, tf.RaggedTensor):
        inputs = inputs.to_tensor(PAD_ID)
    if not tf.is_tensor(inputs):
        inputs = np.asarray(inputs)
    return tf.cast(inputs, tf.int32)

"""Tokenizers: text to integer ids and back."""

from routing_tf.tokenizers.byte_tokenizer import ByteTokenizer
from routing_tf.tokenizers.subword_tokenizer import SubwordTokenizer
from routing_tf.tokenizers.word_tokenizer import WordTokenizer

__all__ = ["ByteTokenizer", "SubwordTokenizer", "WordTokenizer"]

"""Tests of tables and lines for a reader."""

import numpy as np

from routing_tf.analysis import looks
from routing_tf.analysis import reads
from routing_tf.tokenizers import ByteTokenizer

TEXT = "ab\nab"


def case():
    """One head on a text after its start: 4, `a`, reads 2 and 1, and 0 hardly."""
    tokenizer = ByteTokenizer()
    token_ids = np.array([0, *tokenizer.tokenize(TEXT)])
    weights = np.zeros((6, 6))
    weights[1, 0] = 1
    weights[4, :3] = [0.001, 0.25, 0.7]
    return reads.HeadReads(1, 2, "block_1 a 0", weights), token_ids, tokenizer


def test_heads():
    head, token_ids, _ = case()
    *_, chance, lines = looks.describe_reads([head], token_ids, reach=2)
    assert "for 40.00% of the tokens" in chance
    header, row = (line.split() for line in lines.splitlines())
    assert header == ["layer", "head", "name", "distance", "far", "recall", "nothing"]
    cells = ["1", "2", "block_1", "a", "0", "1.5", "0.117", "20.00%", "66.67%"]
    assert row == cells


def test_heads_that_read_nothing():
    head, token_ids, _ = case()
    head.weights[:] = 0
    *_, lines = looks.describe_reads([head], token_ids, reach=2)
    assert lines.splitlines()[1].split()[-4:] == ["-", "0.000", "0.00%", "100.00%"]


def test_a_token():
    head, token_ids, tokenizer = case()
    lines = looks.describe_token(head, 4, token_ids, tokenizer)
    assert list(lines) == [
        'token 4 "a" after "<start>ab↵", followed by "b", reads',
        '  0.700  token 2 "b" after "<start>a"',
        '  0.250  token 1 "a" after "<start>"',
    ]
    (line,) = looks.describe_token(head, 5, token_ids, tokenizer)
    assert line == 'token 5 "b" after "<start>ab↵a" reads nothing'


def test_rows_of_all_tokens():
    head, token_ids, tokenizer = case()
    header, *rows = looks.reads_rows(head, token_ids, tokenizer)
    assert header == ("token", "text", "place", "text of the place", "weight")
    assert rows == [
        ("0", "<start>", "", "", ""),
        ("1", "a", "0", "<start>", "1.0000"),
        ("2", "b", "", "", ""),
        ("3", "↵", "", "", ""),
        ("4", "a", "2", "b", "0.7000"),
        ("5", "b", "", "", ""),
    ]

"""Marked texts for people: printed, drawn, and as a table."""

import csv
import sys

import numpy as np

from routing_tf.analysis import marked_text
from routing_tf.analysis import pictures
from routing_tf.analysis import report


def show_cluster(lm, token_ids, cluster, folder):
    """Prints a text with the tokens of a cluster marked, and draws it in a folder."""
    pieces = marked_text.make_pieces(tokenizer_of(lm), token_ids, cluster.is_member)
    path = folder / f"{cluster.block}_cluster.png"
    count = int(cluster.is_member.sum())
    title = f"{cluster.name}: {count} of {len(token_ids)} tokens"
    pictures.draw_text(pieces, title, path)
    print(f"{title}: {path}")
    marks = marked_text.BRACKETS
    if sys.stdout.isatty():
        marks = marked_text.REVERSE_VIDEO
    print(marked_text.mark(pieces, marks))


def tokenizer_of(lm):
    """Returns the tokenizer of a language model; None if it takes ids."""
    return lm.preprocessor.tokenizer if lm.preprocessor is not None else None


def show_reads(head, token, token_ids, tokenizer, folder):
    """Prints and draws the reads of a token; writes a table of those of all tokens."""
    path = folder / "reads.tsv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, dialect="excel-tab", lineterminator="\n")
        writer.writerows(report.reads_rows(head, token_ids, tokenizer))
    print(f"{head.name}, every token: {path}")
    for line in report.describe_token(head, token, token_ids, tokenizer):
        print(line)
    places = [place for place, _ in head.strongest(token)]
    is_read = np.isin(np.arange(len(token_ids)), places)
    pieces = marked_text.make_pieces(tokenizer, token_ids, is_read)
    number = marked_text.find_piece(tokenizer, token_ids, token)
    path = folder / "reads.png"
    title = f"{head.name}, token {token} and the places it reads most"
    missing = pictures.lack_of_matplotlib()
    if missing is None:
        pictures.draw_text(pieces, title, path, number)
    print(f"{title}: {missing or path}")
    marks = marked_text.BRACKETS, marked_text.ANGLE_BRACKETS
    if sys.stdout.isatty():
        marks = marked_text.REVERSE_VIDEO, marked_text.BOLD_UNDERLINED
    print(marked_text.mark_around(pieces, number, *marks))

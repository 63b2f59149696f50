"""The output of `analyse`: a method for each value of `--what`."""

import csv
import dataclasses
import sys

import numpy as np

from routing_tf.analysis import marked_text
from routing_tf.analysis import pictures
from routing_tf.analysis import reads as reading
from routing_tf.analysis import report
from routing_tf.analysis.causality import find_leaks
from routing_tf.analysis.decoding import compare_decoding
from routing_tf.analysis.decoding import compare_scopes
from routing_tf.analysis.heads import compare_heads
from routing_tf.analysis.probe import Probe
from routing_tf.analysis.reads import find_cluster
from routing_tf.analysis.windows import complete_windows
from routing_tf.analysis.windows import text_window
from routing_tf.files.named_files import make_folder
from routing_tf.training import evaluation

DEFAULT_LENGTHS = {"jsd": 512, "maps": 256, "reads": 256}
# Scoring token by token takes long.
DEFAULT_EXAMPLES = {"causality": 64, "decoding": 4}


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


@dataclasses.dataclass(frozen=True)
class Look:
    """Analyses a model with held-out data, by the flags of `analyse`.

    The fields from `output_dir` on are flags of the same names, whose help describes
    them; None stands for a default. Each method prints its results, and raises a
    `ValueError` if a setting does not fit the model.
    """

    lm: object
    problem: object
    output_dir: str
    split: str = "test"
    routing_scope: str = "full"
    num_windows: int = 8
    num_perturbations: int = 4
    eval_examples: int | None = None
    num_runs: int = 10
    length: int | None = None
    text: str | None = None
    layer: int | None = None
    head: int | None = None
    cluster: int | None = None
    token: int | None = None
    seed: int = 0

    def causality(self):
        """Prints how later tokens reach earlier outputs, and their effect on scores."""
        windows = complete_windows(self.problem, self.split, self.num_windows)
        leaks = find_leaks(
            self.lm,
            windows,
            self.num_perturbations,
            self.routing_scope,
            batch_size=evaluation.batch_size_of(self.lm.hyperparameters, self.problem),
            seed=self.seed,
        )
        print(
            f"{self.split}: all tokens of {len(windows['padding_mask'])} windows "
            f"replaced, from up to {self.num_perturbations} positions of each on; "
            f'routing scope "{self.routing_scope}"'
        )
        print(
            "moved: share of the earlier positions whose output changes\nmean, "
            "largest: change of an earlier output, relative to the root mean square of "
            "these outputs\nby itself: the input of the layer is fixed at earlier "
            "positions; through the stack: it changes, too"
        )
        print(report.leak_table(leaks), flush=True)
        scores = compare_scopes(
            self.lm, self.problem, self.split, self.num_examples("causality")
        )
        for line in report.describe_scores(scores, self.problem, self.split):
            print(line)
        print(report.verdict(leaks))

    def decoding(self):
        """Prints scores in one pass, token by token and as a SavedModel."""
        print("scoring in one pass, token by token, and with a SavedModel", flush=True)
        result = compare_decoding(
            self.lm, self.problem, self.split, self.num_examples("decoding")
        )
        for line in report.describe_decoding(result, self.problem, self.split):
            print(line)

    def num_examples(self, what):
        """Returns the number of windows to score for a method; None for all."""
        if self.eval_examples is None:
            return DEFAULT_EXAMPLES[what]
        return self.eval_examples or None

    def jsd(self):
        """Prints the divergence of heads, and how tokens are spread over clusters."""
        length = self._window_length("jsd")
        windows = complete_windows(self.problem, self.split, self.num_runs, length)
        divergences, occupancies = compare_heads(
            self.lm, windows, self.num_runs, self.routing_scope, self.seed
        )
        print(
            "Jensen-Shannon divergence of two heads' attention, in nats (at most "
            f"{np.log(2):.4f}): mean +- standard deviation of {self.num_runs} runs, "
            "each with two random heads on "
            f"{windows['padding_mask'][0].size} tokens of {self.split}"
        )
        print(report.divergence_table(divergences))
        left_out = max((each.left_out for each in divergences), default=0)
        if left_out:
            print(
                "queries left out, because one of the two heads sees nothing there: "
                f"up to {left_out:.2%} for a pair"
            )
        if occupancies:
            print(
                "\nshare of a head's tokens that are nearest to one centroid: "
                "smallest, largest, and entropy of the shares (1: all alike); in "
                "none: share of tokens that are members of no cluster"
            )
            print(report.occupancy_table(occupancies))

    def maps(self):
        """Draws attention maps; shows the tokens of a cluster."""
        window = self._window("maps")
        attention = Probe(self.lm, self.routing_scope).attention(window)
        cluster = tokens = None
        if "token_ids" in window:
            cluster = find_cluster(attention, self.layer, self.head or 0, self.cluster)
            tokenizer = tokenizer_of(self.lm)
            tokens = marked_text.names(tokenizer, window["token_ids"][0])
        elif {self.layer, self.head, self.cluster} != {None}:
            raise ValueError(
                "--layer, --head and --cluster choose a cluster whose tokens are shown "
                "in a text. Received: one of them with an image model; remove it"
            )
        folder = make_folder("--output_dir", self.output_dir)
        for each in attention:
            path = folder / f"{each.block}.png"
            heads = {name: weights[0] for name, weights in each.maps.items()}
            title = f"{each.block}: how much each token (a row) reads the value of "
            pictures.draw_maps(heads, f"{title}another", path, tokens)
            print(f"{each.block}, who reads whose value with which weight: {path}")
        if cluster is not None:
            show_cluster(self.lm, window["token_ids"][0], cluster, folder)

    def reads(self):
        """Prints how each head reads a text, and which positions a token reads."""
        h = self.lm.hyperparameters
        if h.kind == "image":
            raise ValueError(
                "`--what=reads` needs a language model. Received: an image model; use "
                "--what=maps"
            )
        window = self._window("reads")
        token_ids = window["token_ids"][0]
        attention = Probe(self.lm, self.routing_scope).attention(window)
        heads = reading.list_reads(attention)
        # Local heads see at most their block and those before it.
        reach = h.local_reach
        head = reading.choose_head(heads, reach, self.layer, self.head)
        token = reading.choose_token(head, reach, self.token)
        folder = make_folder("--output_dir", self.output_dir)
        for line in report.describe_reads(heads, token_ids, reach):
            print(line)
        tokenizer = tokenizer_of(self.lm)
        show_reads(head, token, token_ids, tokenizer, folder)

    def _window_length(self, what):
        """The number of tokens to analyse; None for images, which are not cut."""
        h = self.lm.hyperparameters
        if h.kind == "image":
            if self.length is not None:
                raise ValueError(
                    "`--length` must be left out with an image model, whose images are "
                    f"not cut. Received: --length={self.length}"
                )
            return None
        if self.length is None:
            return min(DEFAULT_LENGTHS[what], h.max_sequence_length)
        if self.length > h.max_sequence_length:
            raise ValueError(
                "`--length` must not exceed the model's `max_sequence_length`, "
                f"{h.max_sequence_length}. Received: --length={self.length}"
            )
        return self.length

    def _window(self, what):
        """The text or image to analyse, a batch of one."""
        length = self._window_length(what)
        if self.text is None:
            return complete_windows(self.problem, self.split, 1, length)
        return text_window(self.lm, self.text, length)

"""The output of `analyse`: a method for each value of `--what`."""

import csv
import dataclasses
import math
import sys

import numpy as np

from routing_tf.analysis import pictures
from routing_tf.analysis import reads as reading
from routing_tf.analysis.causality import find_leaks
from routing_tf.analysis.decoding import compare_decoding
from routing_tf.analysis.decoding import compare_scopes
from routing_tf.analysis.heads import compare_heads
from routing_tf.analysis.probe import Probe
from routing_tf.analysis.reads import NOWHERE
from routing_tf.analysis.reads import chance_of_recall
from routing_tf.analysis.reads import find_cluster
from routing_tf.analysis.reads import score_reads
from routing_tf.analysis.windows import complete_windows
from routing_tf.analysis.windows import text_window
from routing_tf.files.named_files import make_folder
from routing_tf.training import evaluation

DEFAULT_LENGTHS = {"jsd": 512, "maps": 256, "reads": 256}
# Scoring token by token takes long.
DEFAULT_EXAMPLES = {"causality": 64, "decoding": 4}


def leak_table(leaks):
    """Returns a table for people with the movement of each part."""
    rows = [("", "by itself", "", "", "through the stack", "", "")]
    rows.append(("part", *["moved", "mean", "largest"] * 2))
    for leak in leaks:
        cells = [
            cell
            for movement in (leak.itself, leak.stack)
            for cell in (
                f"{movement.share:.2%}" if movement.share else "0",
                f"{movement.mean:.3g}",
                f"{movement.largest:.3g}",
            )
        ]
        rows.append((leak.part, *cells))
    return table(rows)


def describe_scores(scores, problem, split):
    """Yields lines for people with the scores of a model in both scopes."""
    full, prefix = (
        _metric(problem, split, bits) for bits in (scores.full, scores.prefix)
    )
    yield (
        f'held-out {problem.metric_name}: {full:.4f} in the routing scope "full", '
        f'{prefix:.4f} in "prefix"'
    )
    error = " (one window, so no standard error)"
    if scores.standard_error is not None:
        error = (
            f" +- {scores.standard_error:.5f} (standard error over "
            f"{scores.num_windows} windows, paired)"
        )
    difference = round(scores.difference, 5) + 0.0  # no -0
    unit = "" if problem.metric_name.startswith("bits") else " in bits per token"
    yield f"difference, prefix - full{unit}: {difference:+.5f}{error}"


def _metric(problem, split, bits):
    """A problem's metric, from bits per token."""
    return problem.metric(bits * math.log(2), split)


def describe_decoding(result, problem, split):
    """Yields lines for people with scores in ways that should agree."""
    yield f"held-out {problem.metric_name} of {result.num_windows} windows"
    yield f"one parallel pass: {_metric(problem, split, result.one_pass):.5f}"
    yield f"token by token: {_metric(problem, split, result.steps):.5f}"
    if problem.segment_ids:
        yield "SavedModel: takes one document in each row"
    elif result.exported is None:
        yield "SavedModel: only on the TensorFlow backend"
    else:
        yield f"SavedModel: {_metric(problem, split, result.exported):.5f}"
    yield f"largest difference for one token: {result.largest_difference:.2g} bits"
    yield (
        f"near-ties, in which rounding decides: {result.near_ties:,} of "
        f"{result.decisions:,} decisions of routed heads"
    )


def verdict(leaks):
    """Returns the last line, which says whether a model is strictly causal."""
    sources = [leak.part for leak in leaks if leak.itself.share]
    sources = [part for part in sources if not part.endswith(" output")] or sources
    last = leaks[-1].stack
    if not sources and last.share:
        sources = ["what comes before the first layer"]
    if not sources:
        return "no earlier output moved: strictly causal"
    return (
        f"later tokens reach earlier outputs by {', '.join(sources)}: at "
        f"{last.share:.1%} of the earlier positions the output of the last layer "
        f"moves, by {last.mean:.1%} of its size on average"
    )


def divergence_table(divergences):
    """Returns a table for people, a row for each block and a column for each pair."""
    if not divergences:
        return "no layer has two heads"
    pairs = list(dict.fromkeys(each.kinds for each in divergences))
    blocks = list(dict.fromkeys(each.block for each in divergences))
    found = {(each.block, each.kinds): each for each in divergences}

    def cell(each):
        if each is None or each.mean is None:
            return "-"
        if each.deviation is None:
            return f"{each.mean:.4f}"
        return f"{each.mean:.4f} +- {each.deviation:.4f}"

    header = ["/".join(k.removesuffix("_heads") for k in kinds) for kinds in pairs]
    rows = [("layer", *header)]
    for block in blocks:
        rows.append((block, *(cell(found.get((block, kinds))) for kinds in pairs)))
    return table(rows)


def occupancy_table(occupancies):
    """Returns a table for people with the occupancy of clusters."""
    names = ["smallest", "largest", "entropy"]
    rows = [("", "here", "", "", "", "in training", "", "")]
    rows.append(("part", *names, "in none", *names))
    for each in occupancies:
        trained = ("-", "-", "-")
        if each.trained is not None:
            trained = _spread_cells(each.trained)
        seen = _spread_cells(each.seen)
        rows.append((each.part, *seen, f"{each.in_none:.2%}", *trained))
    return table(rows)


def _spread_cells(spread):
    shares = (f"{spread.smallest:.2%}", f"{spread.largest:.2%}")
    return (*shares, f"{spread.entropy:.4f}")


def describe_reads(heads, token_ids, reach):
    """Yields lines for people that say how each head of a model reads a text.

    `reach` is the distance from which local heads see nothing.
    """
    yield (
        "distance: mean, of the place read most\n"
        f"far: mean of the largest weight at a distance of {reach} or more, where no "
        "local head sees\n"
        "recall: share of the tokens that read most a place with the very token that "
        "comes next\n"
        "nothing: share of the tokens that read nothing"
    )
    largest, random = chance_of_recall(token_ids)
    yield (
        f"the next token stands in the text before it for {largest:.2%} of the tokens; "
        f"a place at random has it for {random:.2%}"
    )
    rows = [("layer", "head", "name", "distance", "far", "recall", "nothing")]
    for each in heads:
        scores = score_reads(each, token_ids, reach)
        distance = "-" if scores.distance is None else f"{scores.distance:.1f}"
        numbers = f"{scores.far:.3f}", f"{scores.recall:.2%}", f"{scores.nothing:.2%}"
        rows.append((str(each.layer), str(each.head), each.name, distance, *numbers))
    yield table(rows)


def describe_token(reads, token, token_ids, tokenizer):
    """Yields lines for people with the reads of a token, and the text before it.

    Without a tokenizer, ids are shown.
    """

    def name(number):
        text = pictures.in_one_line(tokenizer, token_ids[[number]])
        before = pictures.context(tokenizer, token_ids, number)
        return f'"{text}" after "{before}"'

    places = reads.strongest(token)
    following = ""
    if token + 1 < len(token_ids):
        text = pictures.in_one_line(tokenizer, token_ids[[token + 1]])
        following = f', followed by "{text}",'
    nothing = "" if places else " nothing"
    yield f"token {token} {name(token)}{following} reads{nothing}"
    width = len(str(len(token_ids)))
    for place, weight in places:
        yield f"  {weight:.3f}  token {place:{width}} {name(place)}"


def reads_rows(reads, token_ids, tokenizer):
    """Yields the rows of a table of the strongest read of each token, a header first.

    Position, its text and the weight are empty for a token that reads nothing. Without
    a tokenizer, ids are shown.
    """
    yield "token", "text", "place", "text of the place", "weight"
    texts = pictures.names(tokenizer, token_ids)
    found = zip(texts, reads.places, reads.strengths, strict=True)
    for token, (text, place, weight) in enumerate(found):
        cells = ("", "", "")
        if place != NOWHERE:
            cells = (str(place), texts[place], f"{weight:.4f}")
        yield str(token), text, *cells


def table(rows):
    """Returns rows of strings as text, in columns.

    A cell may run into empty ones after it.
    """
    columns = list(zip(*rows, strict=True))
    widths = [
        max(len(c) for row, c in zip(rows, column) if not _runs_over(row, i))
        for i, column in enumerate(columns)
    ]
    lines = []
    for row in rows:
        line = ""
        for i, cell in enumerate(row):
            start = sum(widths[:i]) + 2 * i
            line = line.ljust(start) + cell
        lines.append(line.rstrip())
    return "\n".join(lines)


def _runs_over(row, index):
    return index + 1 < len(row) and bool(row[index]) and not row[index + 1]


def show_cluster(lm, token_ids, cluster, folder):
    """Prints a text with the tokens of a cluster marked, and draws it in a folder."""
    pieces = pictures.make_pieces(tokenizer_of(lm), token_ids, cluster.is_member)
    path = folder / f"{cluster.block}_cluster.png"
    count = int(cluster.is_member.sum())
    title = f"{cluster.name}: {count} of {len(token_ids)} tokens"
    pictures.draw_text(pieces, title, path)
    print(f"{title}: {path}")
    marks = pictures.BRACKETS
    if sys.stdout.isatty():
        marks = pictures.REVERSE_VIDEO
    print(pictures.mark(pieces, marks))


def tokenizer_of(lm):
    """Returns the tokenizer of a language model; None if it takes ids."""
    return lm.preprocessor.tokenizer if lm.preprocessor is not None else None


def show_reads(head, token, token_ids, tokenizer, folder):
    """Prints and draws the reads of a token; writes a table of those of all tokens."""
    path = folder / "reads.tsv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, dialect="excel-tab", lineterminator="\n")
        writer.writerows(reads_rows(head, token_ids, tokenizer))
    print(f"{head.name}, every token: {path}")
    for line in describe_token(head, token, token_ids, tokenizer):
        print(line)
    places = [place for place, _ in head.strongest(token)]
    is_read = np.isin(np.arange(len(token_ids)), places)
    pieces = pictures.make_pieces(tokenizer, token_ids, is_read)
    number = pictures.find_piece(tokenizer, token_ids, token)
    path = folder / "reads.png"
    title = f"{head.name}, token {token} and the places it reads most"
    missing = pictures.lack_of_matplotlib()
    if missing is None:
        pictures.draw_text(pieces, title, path, number)
    print(f"{title}: {missing or path}")
    marks = pictures.BRACKETS, pictures.ANGLE_BRACKETS
    if sys.stdout.isatty():
        marks = pictures.REVERSE_VIDEO, pictures.BOLD_UNDERLINED
    print(pictures.mark_around(pieces, number, *marks))


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
        print(leak_table(leaks), flush=True)
        scores = compare_scopes(
            self.lm, self.problem, self.split, self.num_examples("causality")
        )
        for line in describe_scores(scores, self.problem, self.split):
            print(line)
        print(verdict(leaks))

    def decoding(self):
        """Prints scores in one pass, token by token and as a SavedModel."""
        print("scoring in one pass, token by token, and with a SavedModel", flush=True)
        result = compare_decoding(
            self.lm, self.problem, self.split, self.num_examples("decoding")
        )
        for line in describe_decoding(result, self.problem, self.split):
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
        print(divergence_table(divergences))
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
            print(occupancy_table(occupancies))

    def maps(self):
        """Draws attention maps; shows the tokens of a cluster."""
        window = self._window("maps")
        attention = Probe(self.lm, self.routing_scope).attention(window)
        cluster = tokens = None
        if "token_ids" in window:
            cluster = find_cluster(attention, self.layer, self.head or 0, self.cluster)
            tokenizer = tokenizer_of(self.lm)
            tokens = pictures.names(tokenizer, window["token_ids"][0])
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
        for line in describe_reads(heads, token_ids, reach):
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

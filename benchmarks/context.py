"""Scores trained models with their past cut: what is context worth to a pattern?

    python -m benchmarks.compare_patterns --seeds=1
    python -m benchmarks.context --plot=docs/context.png

Takes the runs of `compare_patterns` and scores the same spans of the test split, each
with so many bytes before it. A model was trained on windows of 2,048 bytes; longer
contexts show whether it reads beyond them. Prints bits per byte for each context, keeps
them in a file, and draws them.
"""

import itertools

import keras
import numpy as np
import tqdm
from absl import app
from absl import flags
from keras import ops

from benchmarks import compare_patterns
from benchmarks import contest
from routing_tf.models.compiled import compiled
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.training import checkpoints
from routing_tf.training import loading
from routing_tf.training import run_folder

CONTEXTS = ["64", "256", "512", "1024", "2048", "4096", "8192", "16384"]


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_string(
        "runs_dir", "runs/patterns", "Folder of the runs of compare_patterns.", **define
    )
    flags.DEFINE_string(
        "results", "benchmarks/context.json", "File of the figures.", **define
    )
    patterns = compare_patterns.PATTERNS
    flags.DEFINE_list(
        "patterns",
        ["full", "local", "token choice"],
        f"Any of: {', '.join(patterns)}.",
        **define,
    )
    flags.DEFINE_list("key_shifts", ["0", "1"], "Any of: 0, 1.", **define)
    steps = preset_hyperparameters(compare_patterns.PRESET).train_steps
    flags.DEFINE_integer("train_steps", steps, "Steps of the runs.", **define)
    flags.DEFINE_list(
        "contexts",
        CONTEXTS,
        "Bytes before a span. The longest one decides which spans there are.",
        **define,
    )
    flags.DEFINE_integer("span", 64, "Bytes to score.", lower_bound=1, **define)
    flags.DEFINE_integer(
        "num_spans", 64, "Spans, evenly spaced.", lower_bound=1, **define
    )
    flags.DEFINE_integer(
        "longest_full",
        4096,
        "Longest context of full attention, whose memory grows with its square.",
        lower_bound=1,
        **define,
    )
    flags.DEFINE_string("plot", None, "Plot to write: .png, .svg, .pdf.", **define)


def spans_of(tokens, span, num_spans, longest):
    """Returns windows of the longest context and a span each.

    Args:
        tokens: NumPy array `<int>[n]`, a long text.
        span: tokens to score.
        num_spans: number of spans.
        longest: tokens before a span.

    Returns:
        NumPy array `<int32>[num_spans, longest + span]`.

    Raises:
        ValueError: if the text is shorter than one of them.
    """
    room = len(tokens) - longest - span
    if room < 0:
        raise ValueError(
            f"`contexts` must fit into the text of {len(tokens)} tokens. Received: "
            f"{longest}. Leave out the longest ones"
        )
    starts = np.linspace(0, room, num_spans).astype("int64")
    return np.stack([tokens[at : at + longest + span] for at in starts]).astype("int32")


def bits_per_token(lm, windows, context, span):
    """Scores the ends of windows after a context.

    Args:
        lm: the language model.
        windows: as `spans_of` returns them.
        context: number of tokens before the span.
        span: number of tokens to score.

    Returns:
        Mean bits per token of the spans.
    """

    def negative_log_likelihoods(tokens):
        # Behind the first token, which stands for the start of a text.
        inputs = {
            "token_ids": tokens[:, :-1],
            "padding_mask": ops.ones_like(tokens[:, :-1], "bool"),
        }
        logits = lm(inputs, training=False)[:, -span:]
        return keras.losses.sparse_categorical_crossentropy(
            tokens[:, -span:], logits, from_logits=True
        )

    score = compiled(lm, negative_log_likelihoods)
    windows = windows[:, -(context + span) :]
    nats = [ops.convert_to_numpy(score(window[None])) for window in windows]
    return float(np.mean(nats) / np.log(2))


def text_of(problem, longest):
    """Returns the tokens of the start of the test split, one document after another."""
    windows = problem.dataset("test", batch_size=1).as_numpy_iterator()
    parts, size = [], 0
    for _, targets, weights in windows:
        parts.append(targets[weights > 0])
        size += parts[-1].size
        if size > 8 * longest:
            break
    return np.concatenate(parts)


def run(options):
    """Scores all runs; prints the table and draws the plot.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if a run or a flag does not fit.
    """
    patterns = contest.check_list(
        "patterns", options.patterns, list(compare_patterns.PATTERNS)
    )
    contexts = sorted(int(context) for context in options.contexts)
    figures = compare_patterns.Figures(options.results)
    shifts = contest.check_list("key_shifts", options.key_shifts, ["0", "1"])
    for pattern, shift in itertools.product(patterns, map(int, shifts)):
        score_run(options, pattern, shift, contexts, figures)
    print("\n".join(table(figures, options, contexts)))
    if options.plot:
        draw(figures, options, contexts[-1]).savefig(options.plot, dpi=150)


def score_run(options, pattern, shift, contexts, figures):
    """Scores the run of one pattern in all contexts that have no figure yet."""
    longest = max(contexts)
    keys = _keys(options, pattern, shift, longest)
    if pattern == "full":
        contexts = [n for n in contexts if n <= options.longest_full]
    missing = [n for n in contexts if not figures.find(**keys, context=n)]
    if not missing:
        return
    folder = compare_patterns.model_dir(
        options.runs_dir, pattern, shift, options.train_steps, 0
    )
    saved = checkpoints.paths(folder)
    if not saved:
        raise ValueError(
            f"`--runs_dir` must hold a run of each pattern. Received: no {folder}. "
            "Run benchmarks.compare_patterns first"
        )
    lm = loading.load_language_model(saved[-1])
    problem = run_folder.RunConfig.load(folder).make_problem()
    windows = spans_of(
        text_of(problem, longest), options.span, options.num_spans, longest
    )
    for context in tqdm.tqdm(missing, desc=f"{pattern} {shift}", disable=None):
        bits = bits_per_token(lm, windows, context, options.span)
        figures.add(**keys, context=context, bits_per_byte=round(bits, 4))


def table(figures, options, contexts):
    """Returns the lines of a table in Markdown, a row for each model."""
    head = " | ".join(f"{context:,}" for context in contexts)
    lines = [
        f"| routed heads | key_shift | {head} |",
        "| --- | --- |" + " --- |" * len(contexts),
    ]
    for pattern, shift, found in _found(figures, options, contexts[-1]):
        cells = [f"{found[n]:.3f}" if n in found else "-" for n in contexts]
        lines.append(f"| {pattern} | {shift} | {' | '.join(cells)} |")
    return lines


def draw(figures, options, longest):
    """Draws bits per byte against context; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for pattern, shift, found in _found(figures, options, longest):
        contexts = sorted(found)
        axes.plot(
            contexts,
            [found[context] for context in contexts],
            marker="o",
            linestyle="-" if shift else ":",
            color=f"C{list(compare_patterns.PATTERNS).index(pattern)}",
            label=f"{pattern}, key_shift={shift}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of context")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _keys(options, pattern, shift, longest):
    return {
        "pattern": pattern,
        "key_shift": shift,
        "steps": options.train_steps,
        "span": options.span,
        "num_spans": options.num_spans,
        "longest": longest,
    }


def _found(figures, options, longest):
    """Yields pattern, key shift and a dict of figures by context."""
    for pattern, shift in itertools.product(compare_patterns.PATTERNS, (0, 1)):
        entries = figures.find(**_keys(options, pattern, shift, longest))
        if entries:
            yield pattern, shift, {e["context"]: e["bits_per_byte"] for e in entries}


def main(argv):
    return contest.command(argv, run)


if __name__ == "__main__":
    define_flags()
    app.run(main)

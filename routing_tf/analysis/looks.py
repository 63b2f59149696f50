"""What `analyse` shows of a model: a function for each value of `--what`."""

import pathlib

import numpy as np

from routing_tf.analysis import marked_text
from routing_tf.analysis import pictures
from routing_tf.analysis import reads as reading
from routing_tf.analysis import report
from routing_tf.analysis import shown_texts
from routing_tf.analysis.causality import find_leaks
from routing_tf.analysis.clusters import find_cluster
from routing_tf.analysis.decoding import compare_decoding
from routing_tf.analysis.heads import compare_heads
from routing_tf.analysis.probe import Probe
from routing_tf.analysis.scopes import compare_scopes
from routing_tf.analysis.windows import complete_windows
from routing_tf.analysis.windows import text_window
from routing_tf.choices import DEFAULT_EXAMPLES
from routing_tf.choices import DEFAULT_LENGTHS
from routing_tf.training import evaluation


def causality(lm, problem, options):
    """Says how later tokens reach earlier outputs, and what a model scores by it.

    Args:
        lm: the model.
        problem: the problem.
        options: the parsed flags.
    """
    windows = complete_windows(problem, options.split, options.num_windows)
    leaks = find_leaks(
        lm,
        windows,
        options.num_perturbations,
        options.routing_scope,
        batch_size=evaluation.batch_size_of(lm.hyperparameters, problem),
        seed=options.seed,
    )
    print(
        f"{options.split}: all tokens of {len(windows['padding_mask'])} windows "
        f"replaced, from {options.num_perturbations} positions of each on; routing "
        f'scope "{options.routing_scope}"'
    )
    print(
        "moved: share of the earlier positions whose output changes at all\n"
        "mean, largest: change of an earlier output, relative to the root mean square "
        "of these outputs\n"
        "by itself: the input of the layer is held fixed at earlier positions; through "
        "the stack: it moves too"
    )
    print(report.leak_table(leaks), flush=True)
    scores = compare_scopes(lm, problem, options.split, num_examples(options))
    for line in report.describe_scores(scores, problem, options.split):
        print(line)
    print(report.verdict(leaks))


def decoding(lm, problem, options):
    """Says what a model scores in one pass, token by token and as a SavedModel.

    Args:
        lm: the model.
        problem: the problem.
        options: the parsed flags.
    """
    print("scoring in one pass, token by token, and with a SavedModel", flush=True)
    result = compare_decoding(lm, problem, options.split, num_examples(options))
    for line in report.describe_decoding(result, problem, options.split):
        print(line)


def num_examples(options):
    """Returns the number of windows to score; None for all.

    Args:
        options: the parsed flags.
    """
    if options.eval_examples is None:
        return DEFAULT_EXAMPLES[options.what]
    return options.eval_examples or None


def jsd(lm, problem, options):
    """Says how far apart heads are, and how tokens are spread over clusters.

    Args:
        lm: the model.
        problem: the problem.
        options: the parsed flags.
    """
    length = window_length(lm, options)
    windows = complete_windows(problem, options.split, options.num_runs, length)
    divergences, occupancies = compare_heads(
        lm, windows, options.num_runs, options.routing_scope, options.seed
    )
    print(
        "Jensen-Shannon divergence of two heads' attention, in nats (at most "
        f"{np.log(2):.4f}): mean +- standard deviation of {options.num_runs} runs, "
        "each with two random heads on "
        f"{windows['padding_mask'][0].size} tokens of {options.split}"
    )
    print(report.divergence_table(divergences))
    left_out = max((each.left_out for each in divergences), default=0)
    if left_out:
        print(
            "queries left out, since one of the two heads sees nothing there: up to "
            f"{left_out:.2%} for a pair of kinds"
        )
    if occupancies:
        print(
            "\nshare of a head's tokens that are nearest to one centroid: smallest, "
            "largest, and entropy of the shares (1: all alike); in none: share of "
            "tokens that are members of no cluster"
        )
        print(report.occupancy_table(occupancies))


def window_length(lm, options):
    """Returns the number of tokens to look at; None for images, which are whole.

    Args:
        lm: the model.
        options: the parsed flags.

    Raises:
        ValueError: if it is given and does not fit.
    """
    h = lm.hyperparameters
    if h.kind == "image":
        if options.length is not None:
            raise ValueError(
                "`--length` must be left out with an image model, whose images are "
                f"not cut. Received: --length={options.length}"
            )
        return None
    if options.length is None:
        return min(DEFAULT_LENGTHS[options.what], h.max_sequence_length)
    if options.length > h.max_sequence_length:
        raise ValueError(
            "`--length` must not exceed the model's `max_sequence_length`, "
            f"{h.max_sequence_length}. Received: --length={options.length}"
        )
    return options.length


def maps(lm, problem, options):
    """Draws attention maps; shows the tokens of a cluster.

    Args:
        lm: the model.
        problem: the problem.
        options: the parsed flags.

    Raises:
        ValueError: if the text, the cluster or the folder does not fit.
    """
    window = one_window(lm, problem, options)
    attention = Probe(lm, options.routing_scope).attention(window)
    cluster = None
    if "token_ids" in window:
        cluster = find_cluster(
            attention, options.layer, options.head or 0, options.cluster
        )
    elif any(options[name].present for name in ("layer", "head", "cluster")):
        raise ValueError(
            "The tokens of a cluster are shown in texts. Received: `--layer`, `--head` "
            "or `--cluster` with an image model"
        )
    tokens = None
    if "token_ids" in window:
        tokens = marked_text.names(shown_texts.tokenizer_of(lm), window["token_ids"][0])
    folder = make_folder(options)
    for each in attention:
        path = folder / f"{each.block}.png"
        heads = {name: weights[0] for name, weights in each.maps.items()}
        title = f"{each.block}: how much each token (a row) reads the value of another"
        pictures.draw_maps(heads, title, path, tokens)
        print(f"{each.block}, who reads whose value with which weight: {path}")
    if cluster is not None:
        shown_texts.show_cluster(lm, window["token_ids"][0], cluster, folder)


def one_window(lm, problem, options):
    """Returns the text or image to look at, a batch of one.

    Args:
        lm: the model.
        problem: the problem.
        options: the parsed flags.

    Raises:
        ValueError: if the text or the length does not fit.
    """
    length = window_length(lm, options)
    if options.text is None:
        return complete_windows(problem, options.split, 1, length)
    return text_window(lm, options.text, length)


def make_folder(options):
    """Makes the folder of the pictures and returns its path.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if it cannot be written.
    """
    default = pathlib.Path(options.model_dir, options.what)
    folder = pathlib.Path(options.output_dir or default)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            "`--output_dir` must be a folder that can be written. Received: "
            f"{str(folder)!r}: {error.strerror}"
        ) from error
    return folder


def reads(lm, problem, options):
    """Says how each head reads a text; shows which places its tokens read with one.

    Args:
        lm: the model.
        problem: the problem.
        options: the parsed flags.

    Raises:
        ValueError: if the model is one of images, or the text, the head, the token or
            the folder does not fit.
    """
    h = lm.hyperparameters
    if h.kind == "image":
        raise ValueError(
            "`--what=reads` must be given a run of texts: texts only, images have "
            f"`--what=maps`. Received: an image model in {options.model_dir!r}"
        )
    window = one_window(lm, problem, options)
    token_ids = window["token_ids"][0]
    heads = reading.list_reads(Probe(lm, options.routing_scope).attention(window))
    # What local heads may see ends with their block and those before it.
    reach = h.local_block_length * (1 + h.local_flange_blocks)
    head = reading.choose_head(heads, reach, options.layer, options.head)
    token = reading.choose_token(head, reach, options.token)
    folder = make_folder(options)
    for line in report.describe_reads(heads, token_ids, reach):
        print(line)
    tokenizer = shown_texts.tokenizer_of(lm)
    shown_texts.show_reads(head, token, token_ids, tokenizer, folder)

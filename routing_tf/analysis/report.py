"""Tables and lines with the results of the analyses, for people."""

import math

from routing_tf.analysis import marked_text
from routing_tf.analysis.reads import NOWHERE
from routing_tf.analysis.reads import chance_of_recall
from routing_tf.analysis.reads import score_reads


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
        text = marked_text.in_one_line(tokenizer, token_ids[[number]])
        before = marked_text.context(tokenizer, token_ids, number)
        return f'"{text}" after "{before}"'

    places = reads.strongest(token)
    following = ""
    if token + 1 < len(token_ids):
        text = marked_text.in_one_line(tokenizer, token_ids[[token + 1]])
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
    texts = marked_text.names(tokenizer, token_ids)
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

"""Seconds of one decoded token, by the context that caches are made for.

    python -m benchmarks.decode --output=decode.json --plot=decode.png

Our model of local and token choice heads with caches, against computing the whole
prefix for each token, and against a dense transformer (our model with full heads alone)
with a key/value cache. `benchmarks/README.md` explains the table.
"""

from absl import app
from absl import flags

from benchmarks import contenders
from benchmarks import contest
from benchmarks import report

REFERENCE = "cache dense (TensorFlow graph)"


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    lengths = ["1024", "8192", "65536"]
    contest.define_flags(values, lengths, ["float32"], REFERENCE)
    flags.DEFINE_integer(
        "tokens_per_run",
        32,
        "Tokens that one run decodes with caches.",
        lower_bound=1,
        flag_values=values,
    )


def main(argv):
    return contest.command(argv, benchmark)


def benchmark(options):
    """Runs all contexts, prints tables and draws a plot."""
    rows = contest.run(options, cases_of, ["decode"], compare_contexts)
    panels = [("milliseconds per token", _milliseconds)]
    report.plot_lines(options.plot, rows, panels, "decoding, batch 1")


def cases_of(length, kind, dtype, options):
    """Returns the cases of one length and dtype."""
    del kind
    if length < options.tokens_per_run:
        raise ValueError(
            "--lengths must be at least --tokens_per_run, the end of a context. "
            f"Received: --lengths with {length}, "
            f"--tokens_per_run={options.tokens_per_run}"
        )
    return contenders.decode(length, dtype, options)


def compare_contexts(contest_, rows):
    """Prints how much slower a step is at the greatest context than at the least.

    Caches for the two take turns, as contenders and reference do elsewhere.
    """
    options, found = flags.FLAGS, []
    lengths = contest.lengths_of(options)
    least, greatest = lengths[0], lengths[-1]
    if least == greatest:
        return {}
    for dtype in options.dtypes:
        pairs = zip(*(contenders.decode(n, dtype, options) for n in (least, greatest)))
        measured = {(r.contender, r.dtype) for r in rows if r.seconds is not None}
        for short, long in pairs:
            name = short.contender
            if name.startswith("cache") and (name, dtype) in measured:
                row = contest_.duel(long, short)
                found.append(_context_ratio(row, least))
    return {"contexts": found}


def _context_ratio(row, least):
    """Prints and returns the ratio of one contender."""
    if row.ratio is None:
        report.say(f"{row.contender}, {row.dtype}: {row.note or 'no reference'}")
        return {"contender": row.contender, "dtype": row.dtype, "note": row.note}
    times = {"times": 1 / row.ratio, "low": 1 / row.ratio_high}
    times["high"] = 1 / row.ratio_low
    report.say(
        f"{row.contender}, {row.dtype}: a step with caches for {row.length:,} tokens "
        f"takes {times['times']:.2f} times as long ({times['low']:.2f} to "
        f"{times['high']:.2f}) as with caches for {least:,}"
    )
    return {"contender": row.contender, "dtype": row.dtype, **times}


def _milliseconds(row):
    return 1e3 * row.seconds / row.units


if __name__ == "__main__":
    define_flags()
    app.run(main)

"""Contenders take turns with a reference; what all benchmark commands share."""

import contextlib
import dataclasses
import math
import statistics
import subprocess
import sys

import tqdm
from absl import app
from absl import flags

from benchmarks import contenders
from benchmarks import machine
from benchmarks import matrix_product
from benchmarks import report
from benchmarks.processes import Case
from benchmarks.processes import Worker
from benchmarks.processes import WorkerError
from benchmarks.processes import started
from routing_tf.analysis.pictures import check_matplotlib

DTYPES = ("float32", "bfloat16")
MOST_RUNS = 200


def define_flags(values, lengths, dtypes, compare):
    """Defines the flags that the commands share.

    Args:
        values: an `absl.flags.FlagValues`.
        lengths: default of `--lengths`.
        dtypes: default of `--dtypes`.
        compare: default of `--compare`.
    """
    define = {"flag_values": values}
    flags.DEFINE_list("lengths", lengths, "Numbers of tokens.", **define)
    flags.DEFINE_list("dtypes", dtypes, "Any of float32, bfloat16.", **define)
    flags.DEFINE_list(
        "contenders", ["*"], "Names, or patterns such as 'expert*JAX*'.", **define
    )
    flags.DEFINE_string(
        "compare",
        compare,
        "Name of the reference; where it is not installed, the first contender is.",
        **define,
    )
    flags.DEFINE_enum(
        "compare_dtype",
        "float32",
        DTYPES,
        "Type that the reference computes in, whatever the contenders do.",
        **define,
    )
    flags.DEFINE_integer(
        "rounds", 5, "Turns of each contender.", lower_bound=1, **define
    )
    flags.DEFINE_integer(
        "warm_up_runs",
        10,
        "Runs after the first one that are not timed, while allocators still ask the "
        "system for memory; fewer where they would take --max_seconds.",
        lower_bound=1,
        **define,
    )
    flags.DEFINE_float(
        "round_seconds", 0.5, "A turn repeats runs for so long.", **define
    )
    flags.DEFINE_float(
        "max_seconds",
        60.0,
        "A run that takes longer is timed once, and its contender does not run at "
        "lengths where a run would.",
        **define,
    )
    flags.DEFINE_float(
        "timeout", 1800.0, "Seconds that a process may take for a turn.", **define
    )
    flags.DEFINE_enum("device", "cpu", ["cpu", "gpu"], "Where to compute.", **define)
    flags.DEFINE_string("output", None, "JSON file to write.", **define)
    flags.DEFINE_string("plot", None, "Plot to write: .png, .svg, .pdf.", **define)


def define_sizes(values):
    """Defines the flags of the sizes of an attention layer; see `define_flags`."""
    flags.DEFINE_integer("num_heads", 8, "Heads.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "key_dim", 64, "Size of a head.", lower_bound=2, flag_values=values
    )


def command(argv, benchmark):
    """Runs a benchmark with the parsed flags; returns the exit status.

    Args:
        argv: arguments that are no flags, the command itself first.
        benchmark: function of the flags.
    """
    if len(argv) > 1:
        raise app.UsageError(
            f"Settings are given as --name=value. Received: {argv[1:]}"
        )
    try:
        if flags.FLAGS.flag_values_dict().get("plot"):
            check_matplotlib()
        benchmark(flags.FLAGS)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def lengths_of(options):
    """Returns `--lengths` as integers in order.

    Raises:
        ValueError: if one is not a positive integer.
    """
    for length in options.lengths:
        if not length.isdecimal() or not int(length):
            raise ValueError(
                "--lengths must be positive integers, joined by commas. Received: "
                f"{length!r}. Write for example --lengths=1024,8192"
            )
    return sorted(int(length) for length in options.lengths)


def check_list(name, values, choices):
    """Returns the values of a flag that is a list.

    Raises:
        ValueError: if one is none of the choices, or there is none.
    """
    if not values or set(values) - set(choices):
        raise ValueError(
            f"--{name} must be any of {', '.join(choices)}, joined by commas. "
            f"Received: --{name}={','.join(values)}. "
            f"Write for example --{name}={','.join(choices)}"
        )
    return values


@dataclasses.dataclass
class Row:
    """What was measured of one case.

    Args:
        contender: name of the contender.
        length: number of tokens.
        dtype: type of computations.
        passes: what was computed.
        units: what one run makes.
        seconds: median seconds of a run, over all rounds.
        runs: number of timed runs.
        reference_seconds: the same of the reference, between these rounds.
        ratio: how many times as fast as the reference, by these medians.
        ratio_low: the least ratio of one round.
        ratio_high: the greatest.
        bytes_before: memory of the process before its first run.
        peak_bytes: largest memory from then on.
        floor_fraction: least time by the rate of matrix products / `seconds`.
        note: why something is missing.
    """

    contender: str
    length: int
    dtype: str
    passes: str
    units: int = 1
    seconds: float | None = None
    runs: int = 0
    reference_seconds: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    bytes_before: int | None = None
    peak_bytes: int | None = None
    floor_fraction: float | None = None
    note: str = ""

    @classmethod
    def of(cls, case, note=""):
        """A row of a `Case` without figures."""
        return cls(
            case.contender,
            case.length,
            case.dtype,
            case.passes,
            case.units,
            note=note,
        )


class Contest:
    """Runs groups of cases, each in turns with the group's reference.

    Args:
        options: the parsed flags.
        total: number of cases, for the progress bar.
        known: rows that were measured before, by which longer runs are judged.
        has_floor: whether to time matrix products, for the share of the floor.

    Attributes:
        rates: dict from the dtype to operations per second of matrix products, and the
            library that was fastest.
    """

    def __init__(self, options, total, known=(), has_floor=True):
        self._options = options
        self._measured, self._failed = {}, {}
        for row in known:
            self._remember(row)
        self.bar = tqdm.tqdm(total=total, unit="case", disable=None, file=sys.stderr)
        dtypes = dict.fromkeys([*options.dtypes, options.compare_dtype] * has_floor)
        self.rates = {dtype: self._rate(dtype) for dtype in dtypes}

    def _rate(self, dtype):
        """The best rate of matrix products over all libraries."""
        best, device = (0.0, "none"), self._options.device
        for library in ("torch", "tensorflow", "jax"):
            self.bar.set_description(f"matrix product {library} {dtype}")
            arguments = {"library": library, "dtype": dtype, "device": device}
            build = "benchmarks.matrix_product:product"
            case = Case("matrix product", library, build, arguments, length=0)
            with contextlib.suppress(WorkerError), self._worker(case) as worker:
                number = self._warm_up(worker)[1]
                seconds = statistics.median(worker.run(max(3, number)))
                best = max(best, (matrix_product.operations(device) / seconds, library))
        return best

    def group(self, cases, reference):
        """Runs cases of the same length and kind; returns their rows.

        Args:
            cases: list of `Case`.
            reference: the `Case` that takes turns with each; its row comes first.
        """
        *rows, own = self.rows(cases, reference)
        return [own, *rows]

    def rows(self, cases, reference, is_over=lambda: False):
        """Yields each row of a group as soon as it is there, the reference's last.

        Args:
            cases: list of `Case`.
            reference: the `Case` that takes turns with each.
            is_over: function that says before each case whether to leave out the rest.
        """
        with contextlib.ExitStack() as stack:
            own = Row.of(reference, self._reason_to_skip(reference))
            other = self._start_reference(stack, reference, own)
            times = []
            for case in cases:
                if is_over():
                    break
                if case != reference:
                    yield self._row(case, other, times)
                self.bar.update()
            if other is not None:
                self._finish_reference(other, own, times)
            yield own

    def duel(self, case, reference):
        """Returns the row of a case that takes turns with a reference of its own."""
        return self.group([case], reference)[-1]

    def _start_reference(self, stack, reference, row):
        """The reference's worker; None if it is not to run or fails, as `row` says."""
        if row.note:
            return None
        self.bar.set_description(f"{reference.contender} {reference.length}")
        try:
            worker = stack.enter_context(self._worker(reference))
            row.seconds, number = self._warm_up(worker)
            return Turns(worker, row.seconds, number)
        except WorkerError as error:
            row.note = str(error)
            return None

    def _finish_reference(self, other, row, times):
        """Fills the reference's row with all its turns."""
        try:
            times = times or other.turn()
            row.seconds, row.runs = statistics.median(times), len(times)
            row.reference_seconds, row.ratio = row.seconds, 1.0
            self._complete(row, other.worker)
        except WorkerError as error:
            row.note = str(error)

    def _row(self, case, other, times):
        """Runs one case; adds the reference's seconds to `times`."""
        row = Row.of(case, self._reason_to_skip(case))
        if row.note:
            return row
        self.bar.set_description(f"{case.contender} {case.length} {case.dtype}")
        try:
            with self._worker(case) as worker:
                turns = Turns(worker, *self._warm_up(worker))
                if turns.seconds > self._options.max_seconds:
                    row.note = "one run only, perhaps with its compilation"
                    row.seconds, row.runs = turns.seconds, 1
                else:
                    self._take_turns(row, turns, other, times)
                self._complete(row, worker)
        except WorkerError as error:
            row.note = str(error)
            self._failed[_key(case)] = case.length
        return row

    def _take_turns(self, row, turns, other, times):
        own, others = [], []
        for _ in range(self._options.rounds):
            if other is not None and other.worker.is_alive:
                with contextlib.suppress(WorkerError):  # the reference's row tells
                    others.append(other.turn())
            own.append(turns.turn())
        row.seconds = statistics.median(sum(own, []))
        row.runs = sum(map(len, own))
        if len(others) < len(own):
            return
        # Runs of the two may make different numbers of tokens.
        units = row.units / other.worker.case.units
        ratios = [
            units * statistics.median(theirs) / statistics.median(ours)
            for theirs, ours in zip(others, own)
        ]
        row.reference_seconds = statistics.median(sum(others, []))
        row.ratio = units * row.reference_seconds / row.seconds
        row.ratio_low, row.ratio_high = min(ratios), max(ratios)
        times += sum(others, [])

    def _complete(self, row, worker):
        """Memory, the share of the floor, and what longer runs are judged by."""
        row.bytes_before, row.peak_bytes = worker.bytes_before, worker.peak_bytes()
        rate, _ = self.rates.get(row.dtype, (0.0, "none"))
        if worker.case.operations is not None and rate:
            row.floor_fraction = worker.case.operations / rate / row.seconds
        self._remember(row)

    def _remember(self, row):
        if row.seconds is not None:
            self._measured[_key(row)] = (row.length, row.seconds)

    def _reason_to_skip(self, case):
        """Says why a case is not run; empty if it is."""
        available = machine.available_bytes(self._options.device)
        if case.least_bytes > available:
            return (
                f"not run: needs {case.least_bytes / 2**30:.0f} GiB, "
                f"{available / 2**30:.0f} GiB are free"
            )
        if _key(case) in self._failed:
            return f"not run: failed at {self._failed[_key(case)]:,} tokens"
        if _key(case) not in self._measured:
            return ""
        length, seconds = self._measured[_key(case)]
        expected = seconds * (case.length / length) ** case.exponent
        if expected <= self._options.max_seconds:
            return ""
        return f"not run: a run would take about {expected:.0f} s"

    def _worker(self, case):
        return started(case, self._options.device, self._options.timeout)

    def _warm_up(self, worker):
        """Compiles; returns the seconds of a run, and the runs of a turn."""
        seconds, limit = worker.run()[0], self._options.max_seconds
        if seconds <= 3 * limit:  # the first run compiles
            (seconds,) = worker.run()
            number = math.ceil(min(self._options.warm_up_runs, limit / seconds))
            seconds = min(worker.run(number - 1), default=seconds)
        number = math.ceil(self._options.round_seconds / max(seconds, 1e-9))
        return seconds, min(max(1, number), MOST_RUNS)


@dataclasses.dataclass
class Turns:
    """A worker and the number of runs of a turn.

    Args:
        worker: the `Worker`.
        seconds: seconds of its last run.
        number: number of runs of a turn.
    """

    worker: Worker
    seconds: float
    number: int

    def turn(self):
        """Returns the seconds of each run of one turn."""
        return self.worker.run(self.number)


def _key(each):
    """What a `Case` and its `Row` have in common at all lengths."""
    return each.contender, each.dtype, each.passes


def run(options, cases_of, kinds, extra=lambda contest, rows: {}):
    """Runs a whole benchmark: prints tables, writes what the flags ask for.

    Args:
        options: the parsed flags.
        cases_of: function of length, kind, dtype and options that returns cases.
        kinds: list of the kinds, each with tables of its own.
        extra: function of the `Contest` and its rows, called at the end, that
            prints more and returns what JSON is to hold of it, as a dict.

    Returns:
        List of `Row`.
    """
    check_list("dtypes", options.dtypes, DTYPES)
    groups = [
        _group(options, cases_of, length, kind)
        for kind in kinds
        for length in lengths_of(options)
    ]
    contest = Contest(options, sum(len(cases) for cases, _ in groups))
    paths = ("--output", "--plot")
    about = machine.describe() | {
        "arguments": [x for x in sys.argv[1:] if not x.startswith(paths)],
        "matrix_products": {
            dtype: {"operations_per_second": rate, "library": library}
            for dtype, (rate, library) in contest.rates.items()
        },
    }
    report.say(report.heading(about))
    rows = []
    for cases, reference in groups:
        new = contest.group(cases, reference)
        report.say(report.table(new))
        rows += new
        report.write_json(options.output, about, rows)
    more = extra(contest, rows)
    contest.bar.close()
    report.write_json(options.output, about, rows, **more)
    return rows


def _group(options, cases_of, length, kind):
    """The chosen cases of one length and kind, and their reference."""
    cases = [
        case
        for dtype in options.dtypes
        for case in cases_of(length, kind, dtype, options)
    ]
    chosen = contenders.choose(cases, options.contenders)
    if options.device == "gpu" and options.contenders == ["*"]:
        chosen = [case for case in chosen if case.library == "jax"]
    candidates = cases_of(length, kind, options.compare_dtype, options)
    (reference, *_) = contenders.choose(candidates, [options.compare])
    if not all(map(machine.has, filter(None, (reference.library, reference.package)))):
        reference = chosen[0]
    return chosen, reference

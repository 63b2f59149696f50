"""Shows which layers of SmolLM2-135M suffer from sparse attention.

    python -m benchmarks.retrofit.by_layer --texts=TEXTS --plot=docs/existing_layers.png

Prints and draws, for each layer, the share of the full attention that falls on keys
which are not read exactly, and the relative error of the layer's output, from the
report of `retrofit.sparsify`. Figures go into a file, and `--print_only` prints them.
"""

from absl import app
from absl import flags

from benchmarks import machine
from benchmarks import record
from benchmarks.retrofit import contenders
from benchmarks.retrofit import texts


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    texts.define_folder(values)
    flags.DEFINE_integer("keys", 260, "Keys that a query reads.", **define)
    flags.DEFINE_string(
        "results", "benchmarks/retrofit/by_layer.json", "File of the figures.", **define
    )
    flags.DEFINE_string("plot", None, "Plot to write: .png, .svg, .pdf.", **define)
    flags.DEFINE_bool("print_only", False, "Whether to run nothing.", **define)


def main(argv):
    """Measures what the record does not have, prints and draws it."""
    del argv
    options = flags.FLAGS
    runs = record.Record(options.results)
    if not options.print_only and not runs.find({"keys": options.keys}):
        runs.add(
            {"keys": options.keys}, {"layers": measured(options), **machine.describe()}
        )
    print("\n".join(table(runs, options)))
    if options.plot:
        draw(runs, options).savefig(options.plot, dpi=150)


def measured(options):
    """Returns a dict for each layer."""
    from benchmarks.retrofit import smollm2
    from routing_tf import retrofit

    lm = smollm2.load()
    heads = contenders.more_clusters(lm.backbone.num_query_heads, options.keys)
    calibration = texts.calibration_of(lm.preprocessor.tokenizer, options.texts)
    report = retrofit.sparsify(lm, calibration, heads=heads, keep_full=())
    return [
        {
            "layer": layer.index,
            "not read": round(1 - layer.exact_mass, 4),
            "error": round(layer.error, 4),
            "tokens": layer.length,
        }
        for layer in report.layers
    ]


def table(runs, options):
    """Returns the lines of a table with a row for each layer."""
    run = runs.find({"keys": options.keys}) or {"layers": []}
    names = ("layer", "not read", "error")
    rows = [[str(layer[name]) for name in names] for layer in run["layers"]]
    return record.table(list(names), rows)


def draw(runs, options):
    """Draws two bars for each layer; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    found = runs.find({"keys": options.keys})["layers"]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    for shift, (name, label) in enumerate(
        {
            "not read": "attention on keys that are not read exactly",
            "error": "relative error of the output",
        }.items()
    ):
        places = [layer["layer"] + 0.4 * shift - 0.2 for layer in found]
        axes.bar(places, [layer[name] for layer in found], 0.4, label=label)
    axes.set(
        title=f"SmolLM2-135M, {found[0]['tokens']:,} tokens, {options.keys} keys",
        xlabel="layer",
    )
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    return figure


if __name__ == "__main__":
    define_flags()
    app.run(main)

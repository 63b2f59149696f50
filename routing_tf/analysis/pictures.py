"""Pictures of attention maps and of marked texts. They need matplotlib."""

import math

import numpy as np

from routing_tf.analysis.marked_text import LINE_END

MAX_PANELS_IN_A_ROW = 4
PANEL_INCHES = 3.2
TEXT_COLUMNS = 80
MAX_TICKS = 24
MAX_LABEL = 12
CELL_INCHES = (0.09, 0.18)
MARK_COLOUR = "#edae49"
OWN_COLOUR = "#a3c4f3"
DOTS_PER_INCH = 100


def check_matplotlib():
    """Raises a `ValueError` if matplotlib is not installed."""
    missing = lack_of_matplotlib()
    if missing:
        raise ValueError(missing)


def lack_of_matplotlib():
    """Returns a message if matplotlib is not installed, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return (
            "Pictures need matplotlib; install it with `pip install matplotlib`. "
            f"Received: {error}"
        )
    return None


def draw_maps(maps, title, path, tokens=None):
    """Draws the attention maps of a block into a PNG file, a panel for each head.

    Rows are queries, and columns are the positions whose values are read. `maps` has
    the NumPy arrays `<float>[heads, length, length]` of each head group; the axes show
    `tokens`, or only positions without them. Grey follows the square root of the
    weights, so that small ones are visible, too; a scale shows the weights.

    Example:

    ```python
    import numpy as np
    from routing_tf.analysis import pictures

    maps = {"local_heads": np.tri(8)[None] / np.arange(1, 9)[:, None]}
    pictures.draw_maps(maps, "block_0", "block_0.png")
    ```
    """
    panels = [
        (f"{name} {head}", weights)
        for name, heads in maps.items()
        for head, weights in enumerate(heads)
    ]
    columns = min(len(panels), MAX_PANELS_IN_A_ROW)
    rows = math.ceil(len(panels) / columns)
    size = (PANEL_INCHES * columns, (PANEL_INCHES + 0.2) * rows + 0.4)
    figure = _figure(size)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in axes:
        panel.axis("off")
    for panel, (name, weights) in zip(axes, panels, strict=False):
        panel.axis("on")
        greys = panel.imshow(weights, cmap="Greys", norm=_square_root())
        panel.set_title(name, fontsize=9)
        _label_positions(panel, len(weights), tokens)
    scale = figure.colorbar(greys, ax=list(axes), shrink=0.8, aspect=30)
    scale.set_label("attention weight", fontsize=9)
    scale.ax.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=10, parse_math=False)
    figure.supxlabel("token whose value is read", fontsize=9)
    figure.supylabel("token that reads (query)", fontsize=9)
    _save(figure, path)


def _square_root():
    from matplotlib import colors

    return colors.PowerNorm(0.5, vmin=0, vmax=1)


def _label_positions(panel, length, tokens):
    """Labels the axes with as many positions and tokens as are legible."""
    step = -(-length // MAX_TICKS)
    positions = list(range(0, length, step))
    labels = [str(position) for position in positions]
    if tokens is not None:
        labels = [f"{tokens[p][:MAX_LABEL]} {p}" for p in positions]
    style = {"fontsize": 6, "family": "monospace", "parse_math": False}
    panel.set_xticks(positions, labels, rotation=90, **style)
    panel.set_yticks(positions, labels, **style)


def draw_text(pieces, title, path, number=None):
    """Draws pieces of a text into a PNG file, with coloured marks.

    The piece `number`, if given, has another colour.

    Example:

    ```python
    from routing_tf.analysis import marked_text
    from routing_tf.analysis import pictures

    pieces = [marked_text.Piece("c", True), marked_text.Piece("at", False)]
    pictures.draw_text(pieces, "one letter", "text.png")
    ```
    """
    cells = lay_out(pieces)
    num_rows = 1 + max((row for row, *_ in cells), default=0)
    width, height = CELL_INCHES
    figure = _figure((TEXT_COLUMNS * width + 0.2, num_rows * height + 0.5))
    figure.suptitle(title, fontsize=9)
    axes = figure.add_subplot()
    axes.axis("off")
    colours = np.zeros((num_rows, TEXT_COLUMNS), "int32")
    for row, column, character, marked in cells:
        colours[row, column] = marked
        # Otherwise matplotlib would read a formula between two dollars.
        axes.text(
            column,
            row,
            character,
            family="monospace",
            fontsize=9,
            ha="center",
            va="center",
            parse_math=False,
        )
    if number is not None:
        own = slice(len(lay_out(pieces[:number])), len(lay_out(pieces[: number + 1])))
        for row, column, *_ in cells[own]:
            colours[row, column] = 2
    axes.imshow(_rgb(colours), extent=_extent(colours), aspect="auto", zorder=0)
    _save(figure, path)


def lay_out(pieces, num_columns=TEXT_COLUMNS):
    """Returns (row, column, character, is_marked) for each character of a text."""
    cells, row, column = [], 0, 0
    for piece in pieces:
        for character in piece.text.replace("\t", "    "):
            if column == num_columns:
                row, column = row + 1, 0
            ends = character == "\n"
            shown = LINE_END if ends else character
            cells.append((row, column, shown, piece.is_marked))
            row, column = (row + 1, 0) if ends else (row, column + 1)
    return cells


def _rgb(numbers):
    from matplotlib import colors

    return np.array(colors.to_rgba_array(["white", MARK_COLOUR, OWN_COLOUR]))[numbers]


def _extent(cells):
    rows, columns = cells.shape
    return (-0.5, columns - 0.5, rows - 0.5, -0.5)


def _figure(size):
    check_matplotlib()
    from matplotlib import figure

    return figure.Figure(figsize=size, layout="constrained")


def _save(figure, path):
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})

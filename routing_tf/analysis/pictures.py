"""Pictures of attention maps and of marked texts. They need matplotlib."""

import codecs
import dataclasses
import math

import numpy as np

from routing_tf.generation.display import printable
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import WordTokenizer
from routing_tf.tokenizers.byte_tokenizer import BYTE_OFFSET
from routing_tf.tokenizers.byte_tokenizer import PAD_ID

MAX_PANELS_IN_A_ROW = 4
PANEL_INCHES = 3.2
TEXT_COLUMNS = 80
MAX_TICKS = 24
MAX_LABEL = 12
CELL_INCHES = (0.09, 0.18)
MARK_COLOUR = "#edae49"
OWN_COLOUR = "#a3c4f3"
DOTS_PER_INCH = 100

BRACKETS = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}",
)
REVERSE_VIDEO = ("\x1b[7m", "\x1b[0m")
# Around the token for which others are marked.
ANGLE_BRACKETS = (
    "\N{MATHEMATICAL LEFT DOUBLE ANGLE BRACKET}",
    "\N{MATHEMATICAL RIGHT DOUBLE ANGLE BRACKET}",
)
BOLD_UNDERLINED = ("\x1b[1;4m", "\x1b[0m")
LINE_END = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
TAB = "\N{RIGHTWARDS ARROW TO BAR}"
CONTEXT_CHARACTERS = 24
# The leading id of texts, which is padding elsewhere.
START = "<start>"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a text that is shown together."""

    text: str
    is_marked: bool


def make_pieces(tokenizer, token_ids, is_marked):
    """Cuts the text of some tokens into a piece for each token or character.

    A character of several bytes is marked if one of them is. Subwords are shown as in
    their vocabulary, with a space for the underscore that ends a word; other characters
    that cannot be printed are U+FFFD, and the leading id 0 of texts is `START`.
    """
    token_ids = [int(id) for id in token_ids]
    if isinstance(tokenizer, ByteTokenizer):
        pieces = _byte_pieces(tokenizer, token_ids, is_marked)
    else:
        pieces = [
            Piece(_name(tokenizer, id), bool(marked))
            for id, marked in zip(token_ids, is_marked, strict=True)
        ]
    return [dataclasses.replace(p, text=printable(p.text)) for p in pieces]


def mark(pieces, marks):
    """Joins pieces, with a pair of marks such as `BRACKETS` around marked ones.

    Neighbours share a pair. A marked line end is shown as an arrow before it.
    """
    parts, inside = [], False
    for piece in pieces:
        if piece.is_marked != inside:
            parts.append(marks[inside])
            inside = piece.is_marked
        shown = piece.text
        parts.append(shown.replace("\n", LINE_END + "\n") if inside else shown)
    return "".join(parts) + (marks[1] if inside else "")


def find_piece(tokenizer, token_ids, token):
    """Returns the number of the piece that shows a token."""
    is_token = [number == token for number in range(len(token_ids))]
    pieces = make_pieces(tokenizer, token_ids, is_token)
    return [piece.is_marked for piece in pieces].index(True)


def mark_around(pieces, number, marks, own_marks):
    """Joins pieces as `mark` does, with other marks around one of them."""
    own = dataclasses.replace(pieces[number], is_marked=True)
    parts = (pieces[:number], marks), ([own], own_marks), (pieces[number + 1 :], marks)
    return "".join(mark(*part) for part in parts)


def in_one_line(tokenizer, token_ids):
    """Returns the text of tokens in one line, with line ends and tabs as arrows."""
    pieces = make_pieces(tokenizer, token_ids, [False] * len(token_ids))
    text = "".join(piece.text for piece in pieces)
    return text.replace("\n", LINE_END).replace("\t", TAB)


def names(tokenizer, token_ids):
    """Returns the text of each token, in one line."""
    return [in_one_line(tokenizer, [id]) for id in token_ids]


def context(tokenizer, token_ids, token):
    """Returns the end of the text before a token, in one line."""
    # A character has up to four bytes.
    start = max(0, token - 4 * CONTEXT_CHARACTERS)
    return in_one_line(tokenizer, token_ids[start:token])[-CONTEXT_CHARACTERS:]


def _byte_pieces(tokenizer, token_ids, is_marked):
    pieces, marked = [], False
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(text):
        nonlocal marked
        if text:
            pieces.append(Piece(text, marked))
            marked = False

    for id, is_member in zip(token_ids, is_marked, strict=True):
        is_byte = id >= BYTE_OFFSET
        if not is_byte:
            add(decoder.decode(b"", final=True))
        marked = marked or bool(is_member)
        if is_byte:
            add(decoder.decode(bytes([id - BYTE_OFFSET])))
        else:
            add(_name(tokenizer, id))
    add(decoder.decode(b"", final=True))
    return pieces


def _name(tokenizer, id):
    if tokenizer is None:
        return f"{id} "
    name = START if id == PAD_ID else tokenizer.id_to_token(id)
    if isinstance(tokenizer, WordTokenizer):
        return "\n" if id == tokenizer.newline_token_id else f"{name} "
    return name[:-1] + " " if name.endswith("_") else name


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
    from routing_tf.analysis import pictures

    pieces = [pictures.Piece("c", True), pictures.Piece("at", False)]
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

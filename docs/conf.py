"""How Sphinx builds the documentation: `python -m sphinx -W docs docs/_build`."""

import inspect
import os
import re

# The documentation of the layers needs no accelerator and says nothing of one.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from sphinx.util.inspect import stringify_signature

from routing_tf import __version__
from routing_tf import zoo

# Files of weights know these classes by the names of their bases.
for _name in ("ReformerHeads", "ThresholdHeads"):
    getattr(zoo, _name).__name__ = _name

project = "routing_tf"
author = "the routing_tf authors"
version = release = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Of blocks without a language: commands and what they print.
highlight_language = "text"
html_title = f"routing_tf {version}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Call arguments", "params_style"), ("State", "notes")]
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)$")
SECTION = re.compile(r"^## (?P<title>.*)\n(?P<text>(?:(?!^## ).*\n?)*)", re.M)
LINK = re.compile(r"\[(?P<title>[^]]+)\]\(docs/(?P<page>[\w/]+)\.md\)")
PAGE = re.compile(r"\]\((?P<page>[\w/]+)\.md\)")


def to_restructured_text(app, what, name, of, options, lines):
    """Turns the Markdown of a docstring into what reStructuredText has for it."""
    found, language = [], None
    for line in lines:
        opens = FENCE.match(line)
        if opens and language is None:
            language = opens["language"]
            found += ["", f"{opens['indent']}.. code-block:: {language}", ""]
        elif line.strip() == "```" and language is not None:
            language = None
            found.append("")
        elif language is not None:
            found.append(f"    {line}" if line else line)
        else:
            code = CODE.sub(r"``\1``", line)
            found.append(LINK.sub(r":doc:`\g<title> </\g<page>>`", code))
    lines[:] = found


def real_signature(app, what, name, of, options, signature, returns):
    """Shows the arguments of a class's `__init__`: `__new__` of Keras hides them."""
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    first, *arguments = inspect.signature(of.__init__).parameters.values()
    shown = inspect.Signature(arguments)
    return stringify_signature(shown, show_annotation=False), None


def list_pages(app, name, source):
    """Makes the links of the home page the contents of the site.

    On GitHub the page is a plain list of links, a section for each part.
    """
    if name != app.config.root_doc:
        return
    for section in SECTION.finditer(source[0]):
        pages = [found["page"] for found in PAGE.finditer(section["text"])]
        if section["text"].lstrip().startswith("- "):
            options = f":caption: {section['title']}\n:hidden:\n:maxdepth: 1\n\n"
            listed = "\n".join(dict.fromkeys(pages))
            source[0] += f"\n```{{toctree}}\n{options}{listed}\n```\n"


def setup(app):
    """Registers what turns docstrings, before napoleon reads their sections."""
    app.connect("autodoc-process-docstring", to_restructured_text, priority=400)
    app.connect("autodoc-process-signature", real_signature)
    app.connect("source-read", list_pages)

"""The documentation site, built by .ci/site.

Pages are read on a code host too: links go to files, and an anchor is what a code host makes of a heading.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole
from sphinx.util.inspect import stringify_signature

import torch_dpsco

sys.path.append(str(Path(__file__).parent))  # the gallery imports quick_run
CARD = Path(__file__).parent / "_build" / "card" / "card.html"
CARD.parent.mkdir(parents=True, exist_ok=True)

project = "torch_dpsco"
author = "The torch_dpsco contributors"
version = release = torch_dpsco.__version__
extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery/*.py", "gallery/*.ipynb", "gallery/data"]
highlight_language = "text"
default_role = "code"

html_theme = "sphinx_book_theme"
html_title = "torch_dpsco"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_build/card"]
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the search is in the side bar
}

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 6  # by the rule of code hosts
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parent / "_build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # of a cell, in seconds; on quiet cores none takes more than a few
nb_output_stderr = "remove"  # progress bars
nb_merge_streams = True  # which would cut what is printed into pieces

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Guarantee", "Source"]
napoleon_use_rtype = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"^(adult|flights|pictures|ray_train|spark)\.py$",  # read by others; not installed
    "reset_argv": "conf.quick_run",
    "download_all_examples": False,
    "default_thumb_file": str(Path(__file__).parent / "images" / "accuracy.svg"),
    "show_signature": False,
    "show_memory": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "remove_config_comments": True,
}

# pages whose blocks of Python are run one after the other, and shown with what they print and draw
RUN = {
    "index",
    "study",
    "released",
    "estimators",
    "inference",
    "schema",
    "nets",
    "tuning",
    "conformal",
    "public_data",
    "choose_epsilon",
    "integrations/lightning",
}
NOTEBOOK = """---
file_format: mystnb
kernelspec: {name: python3, display_name: Python 3, language: python}
---

"""

QUICK = (
    "What is printed and drawn below is of a run with ``--quick``: seconds, and little accuracy."
)

PROGRESS = re.compile(
    r"^ +(\d+%\|.*)?\n(?= +\d+%\|)|^ +\d+%\|.*\n", re.MULTILINE
)  # bars, and a blank before

SEE = re.compile(r"^( +)([\w, ]+): see `(\w+)`[;.]?(?: (.*))?$")
CITATION = re.compile(r"\bdocs/([\w./-]+)\.md(?:#([\w-]+))?")
ROOT_PAGE_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[A-Z]+\.md)\)")  # ../SECURITY.md
EXAMPLE_LINK = re.compile(r"\]\(((?:\.\./)+)examples/(\w+)\.py\)")


def quick_run(gallery: Any, script: dict[str, Any]) -> list[str]:
    """Returns the arguments of an example of the gallery."""
    return ["--quick"]


class Cited(SphinxRole):
    """A page of docs, or a heading of it, that a docstring cites."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Returns a reference that MyST resolves, as it does that of a link in a page."""
        page, _, anchor = self.text.partition("#")
        words = (anchor or page.rpartition("/")[2]).replace("-", " ").replace("_", " ")
        target = pending_xref(
            refdoc=self.env.docname,
            refdomain="doc",
            reftype="myst",
            reftarget=page,
            reftargetid=anchor or None,
            refexplicit=True,
        )
        target += nodes.inline("", words)
        return [target], []


def as_rst(text: str) -> str:
    """Returns a paragraph of a docstring, which is plain text with `code`, as reStructuredText."""
    if ">>>" in text:
        return text
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [
        re.sub(r"[|\\]|\*(?! )|(?<=\w)_(?=[^\w:(]|$)", lambda mark: f"\\{mark[0]}", part)
        for part in parts[::2]
    ]
    return CITATION.sub(
        lambda cited: f":cited:`{cited[0][5:].replace('.md', '')}`", "".join(parts)
    )


def as_list_table(text: str) -> str:
    """Returns a table of a docstring, written as in Markdown, as reStructuredText."""
    lines = [line.strip().strip("|").split(" | ") for line in text.split("\n")]
    rows = [[as_rst(cell.strip()) for cell in row] for at, row in enumerate(lines) if at != 1]
    written = [".. list-table::", "   :header-rows: 1", "   :widths: auto", ""]
    for row in rows:
        written += [f"   {'-' if at else '* -'} {cell}" for at, cell in enumerate(row)]
    return "\n".join(written).replace("\n   - ", "\n     - ")


def paragraphs(text: str) -> list[str]:
    """Returns what blank lines separate."""
    return re.split(r"\n{2,}", text.strip("\n"))


def arguments(about: Any) -> dict[str, list[str]]:
    """Returns the lines of each argument that the docstring of a class names in one line of its own."""
    found, names = dict[str, list[str]](), list[str]()
    _, _, section = (inspect.getdoc(about) or "").partition("\nArgs:\n")
    for line in section.partition("\n\n")[0].split("\n"):
        named = re.match(r" {4}([\w, ]+): (.*)", line)
        names = named[1].split(", ") if named else names
        for name in names:
            found.setdefault(name, []).append(named[2] if named else line.strip())
    return found


def named_by(obj: Any, name: str) -> Any:
    """Returns what a docstring calls by a name: a base class, a name of its module, or one of the library."""
    bases = {base.__name__: base for base in getattr(obj, "__mro__", ())}
    module = sys.modules[getattr(obj, "__module__", "torch_dpsco")]
    return bases.get(name) or getattr(module, name, None) or getattr(torch_dpsco, name, None)


def spelled_out(obj: Any, line: str) -> list[str]:
    """Returns what an argument is where a docstring only says which class explains it."""
    refers = SEE.match(line)
    known = arguments(named_by(obj, refers[3])) if refers else {}
    if not refers or not all(name in known for name in refers[2].split(", ")):
        return [line]
    first, *others = (
        f"{refers[1]}{name}: {' '.join(known[name])}" for name in refers[2].split(", ")
    )
    also = f"{refers[4][:1].upper()}{refers[4][1:]}" if refers[4] else ""
    return [f"{first} {also}".rstrip(), *others]


def signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    shown: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Returns what a class is made of, where Sphinx shows a constructor that takes anything."""
    if what != "class" or "*args" not in (shown or ""):
        return None
    real = inspect.signature(obj)
    return stringify_signature(
        real, show_return_annotation=False, unqualified_typehints=True
    ), None


def docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Rewrites a docstring: indented blocks outside of sections are formulas and stay as they are."""
    written, in_section = [], False
    for text in paragraphs("\n".join(lines)):
        in_section = (in_section and text.startswith(" ")) or bool(
            re.match(r"[A-Z]\w+:\n ", text)
        )
        formula = text.startswith(" ") and not in_section
        names_joined = re.sub(
            r"(?m)^(    [\w, ]+,)\n +", r"\1 ", text
        )  # "Args:" of one line each
        lines_of_arguments = (
            part for line in names_joined.split("\n") for part in spelled_out(obj, line)
        )
        if text.startswith("| "):
            written += [as_list_table(text)]
        elif formula:
            written += ["::", text]
        else:
            written += [as_rst("\n".join(lines_of_arguments))]
    lines[:] = "\n\n".join(written).split("\n")


def card(app: Sphinx) -> None:
    """Makes the study of the first page, whose card that page shows, unless it was made by these sources."""
    page, names = Path(app.srcdir) / "index.md", dict[str, Any]()
    sources = [page, *Path(torch_dpsco.__file__).parent.rglob("*.py")]
    if CARD.is_file() and CARD.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return
    exec(page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0], names)
    names["found"].report().save(CARD, overwrite=True)


def source(app: Sphinx, docname: str, text: list[str]) -> None:
    """Gives pages of the gallery a title, sends links to examples there, makes pages of `RUN` notebooks."""
    if docname == "gallery/index":
        text[0] = text[0].split("\n# ")[0]  # examples/data is no part of the gallery
    elif docname.startswith("gallery/"):
        head, label, body = text[0].partition(f".. _sphx_glr_{docname.replace('/', '_')}.py:\n")
        title, _, rest = body.strip().partition(": ")
        about, code, rest = rest.partition(".. GENERATED")
        written = [
            f"::\n\n{part}" if part.startswith(" ") else as_rst(part)
            for part in paragraphs(about)
        ]
        rest = PROGRESS.sub("", rest)
        written[0] = written[0][:1].upper() + written[0][1:]
        text[0] = "\n\n".join(
            [head + label, f"{title}\n{'=' * len(title)}", *written, QUICK, code + rest]
        )
    if docname in RUN:
        text[0] = NOTEBOOK + text[0].replace("```python\n", "```{code-cell} python\n")
    # links to files that are no page of the site are downloads
    text[0] = ROOT_PAGE_LINK.sub(r"{download}`\1 <\2>`", text[0])
    shown = {path.stem for path in (Path(app.srcdir) / "gallery").glob("*.rst")}
    text[0] = EXAMPLE_LINK.sub(
        lambda link: f"]({link[1][3:]}gallery/{link[2]}.rst)" if link[2] in shown else link[0],
        text[0],
    )


def formula(translator: Any, node: nodes.Element) -> None:
    """Writes a formula as MathML, which browsers typeset by themselves, where Sphinx would load a script of others."""
    is_block = isinstance(node, nodes.math_block)
    translator.body.append(tex2mathml(node.astext(), as_block=is_block))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connects the above."""
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.add_role("cited", Cited())
    app.connect("autodoc-process-docstring", docstring, priority=1)  # before napoleon
    app.connect("autodoc-process-signature", signature)
    app.connect("builder-inited", card)
    app.connect("source-read", source)

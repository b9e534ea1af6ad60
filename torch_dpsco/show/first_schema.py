"""A first schema of a table, `dpsco init`: names, kinds, ids and dialect as they look, and questions for the rest.

What is looked up in a table is looked up without noise, and named in the file and on the terminal: whoever publishes a
model publishes it too. Ranges, levels and labels are never looked up in the table, only in another one that is public.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from torch_dpsco.estimators.files import ALLOWED, TEXT, Cells, Dialect, opened
from torch_dpsco.estimators.reading import names as names_of
from torch_dpsco.estimators.schema import OPEN, Date, key, number, numbers, toml
from torch_dpsco.show.look import ID_WORDS

_NEARLY = 0.9  # of values that a kind can read
_FEW = 10  # different numbers, that may be levels
_MANY = 50  # different texts, that are no levels any more
_LOOKED_AT = 10_000  # values of a column
_START = 1 << 20  # characters by which a dialect is told
_ENDS_IDS = re.compile("^(nr|no|number)$|nummer$")  # the last word of names of ids
_PEOPLE = ("patient", "person", "subject", "participant", "user", "customer", "client", "member")
_DAYS = (
    "%Y-%m-%d",
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d.%m.%y",
    "%Y/%m/%d",
    "%d-%m-%Y",
)
_TIMES = ("", " %H:%M", " %H:%M:%S", "T%H:%M:%S")
_HEAD = """\
# What is public about {table}, as torch_dpsco reads it. Written by dpsco init.
#
# Looked up in the table, without noise: names of columns, their kinds, ids, and the dialect. Read and correct them:
# this file and each model that is fitted with it tell them to others.
# NOT looked up are numbers and levels. Answer each "?" from public knowledge, such as a code book or the law, and never
# by looking at the table: a range that is read off the table tells of the most extreme person in it.
# Remove the columns that you do not need: each one costs accuracy.
"""


@dataclass(frozen=True)
class Guess:
    """What a column looks like.

    Args:
        kind: "number", "category", "date", "ids" or "text".
        format: of dates; "?" where day and month cannot be told apart.
        answers: what is public about it, as text of TOML: "low" and "high", or "levels"; else they are asked for.
    """

    kind: str
    format: str = ""
    answers: Mapping[str, str] | None = None

    def answer(self, name: str) -> str:
        """Returns a public number, or a question."""
        return (self.answers or {}).get(name, toml([OPEN] if name == "levels" else OPEN))


@dataclass(frozen=True)
class Draft:
    """A schema with questions.

    Args:
        table: name of the file.
        dialect: of the file.
        columns: by name.
        target: name of the column of targets; None asks for it.
        ids: name of the column of ids; None for none.
        public: name of the file that answers are from; None for none.
    """

    table: str
    dialect: Dialect
    columns: Mapping[str, Guess]
    target: str | None
    ids: str | None
    public: str | None

    @property
    def features(self) -> dict[str, Guess]:
        """The columns that a model can use."""
        return {
            name: guess
            for name, guess in self.columns.items()
            if guess.kind not in ("ids", "text") and name not in (self.target, self.ids)
        }

    @property
    def unit(self) -> str:
        """What one unit is called, by the name of the column of ids."""
        words = [
            word
            for word in _words(self.ids or "")
            if word not in ID_WORDS and not _ENDS_IDS.search(word)
        ]
        return " ".join(words) if words and " ".join(words).isascii() else "person"

    @property
    def looked_up(self) -> dict[str, str]:
        """What was looked up in the table, by name."""
        found = {
            "dialect": ", ".join(f"{name} {sign!r}" for name, sign in self.signs.items()),
            "ids": self.ids or "none",
        }
        for kind in ("number", "category", "date"):
            found[kind] = ", ".join(
                f"{name} {guess.format}".rstrip()
                for name, guess in self.features.items()
                if guess.kind == kind
            )
        found["left out"] = ", ".join(self.left_out)
        return {name: what for name, what in found.items() if what}

    @property
    def signs(self) -> dict[str, str]:
        """The dialect of a text file; of others, what was told about it."""
        plain = asdict(Dialect())
        shown = {} if Path(self.table).suffix.lower() not in TEXT else plain.keys() - {"sheet"}
        given = asdict(self.dialect)
        return {
            name: sign for name, sign in given.items() if name in shown or sign != plain[name]
        }

    @property
    def left_out(self) -> list[str]:
        """The columns that are neither features nor target nor ids."""
        known = (*self.features, self.target, self.ids)
        return [repr(name) for name in self.columns if name not in known]

    def __str__(self) -> str:
        lines = [_HEAD.format(table=self.table), *self._target(), "", *self._units()]
        if self.public is not None:
            lines.insert(
                1, f"# Ranges and levels are those of {self.public}, which is public.\n"
            )
        if self.signs:
            lines += ["", "[dialect]  # how the file writes its cells"]
        lines += [f"{name} = {toml(value)}" for name, value in self.signs.items()]
        for name, guess in self.features.items():
            lines += ["", f"[columns.{toml(name)}]", *_column(guess)]
        if self.left_out:
            lines += ["", f"# Left out, as free text or ids: {', '.join(self.left_out)}"]
        return "\n".join([*lines, ""])

    def _target(self) -> Iterator[str]:
        if self.target is None:
            yield from (
                f"target = {toml(OPEN)}  # name of the column to be predicted; remove it from the columns below",
                f'labels = [{toml(OPEN)}]  # all that can occur, as ["no", "yes"]: the second of two is positive',
                "# target_range = [0, 100]  # in place of labels, where the target is a number: lowest and highest",
            )
            return
        guess = self.columns[self.target]
        yield f"target = {toml(self.target)}  # what is to be predicted"
        if guess.kind == "number":
            ends = f"[{guess.answer('low')}, {guess.answer('high')}]"
            yield f"target_range = {ends}  # lowest and highest value that are possible"
        else:
            labels = guess.answer("levels")
            yield f'labels = {labels}  # all that can occur, as ["no", "yes"]: the second of two is positive'

    def _units(self) -> Iterator[str]:
        if self.ids is None:
            yield "# Without ids each row is protected by itself, and not a person with several rows:"
            yield '# ids = "..."  # name of the column that says whose row it is'
            yield '# unit = "patient"  # what one of them is called; without ids also one_row_per_unit = true'
            return
        yield f"ids = {toml(self.ids)}  # the column that says whose row it is"
        yield f"unit = {toml(self.unit)}  # what one of them is called in reports"
        yield 'rows_per_unit = 1  # how many rows of each are kept, the first ones; "all" for all'


def _column(guess: Guess) -> Iterator[str]:
    """Yields the fields of a column."""
    if guess.kind == "category":
        yield 'kind = "category"  # or "ordered", with the lowest level first'
        yield f"levels = {guess.answer('levels')}  # all that can occur; all else counts as missing"
        return
    yield f"kind = {toml(guess.kind)}"
    least = "lowest possible value"
    most = "highest possible value"
    if guess.kind == "date":
        least = 'first possible day, as "1920-01-31"'
        most = "last possible day"
        why = "  # day or month first?" if guess.format == OPEN else ""
        yield f"format = {toml(guess.format)}{why}"
    yield f"low = {guess.answer('low')}  # {least}; what is below counts as it"
    yield f"high = {guess.answer('high')}  # {most}"
    yield "missing = true  # one more feature says so; false if none is missing: other rows would teach nothing"


def drafted(
    table: str,
    given: Mapping[str, str],
    *,
    target: str | None = None,
    ids: str | None = None,
    public: str | None = None,
) -> Draft:
    """Returns a first schema of a table.

    Args:
        table: path of the file.
        given: fields of its dialect that are known.
        target: name of the column of targets, if known.
        ids: name of the column of ids, if known.
        public: path of a file of the same form that is public, from which ranges and levels are taken.

    Raises:
        ValueError: the file cannot be read, or has no such column.
    """
    dialect = guessed_dialect(table, given)
    frame = opened(table, None, dialect)
    there = names_of(frame)
    if any(math.isfinite(number(dialect.number(name))) for name in there):
        # PRIVACY: else the first record would be published as names (test_a_record_is_no_line_of_names)
        raise ValueError(
            f"frame must begin with a line of column names (got a number in it, in {table!r})"
        )
    for name, value in (("target", target), ("ids", ids)):
        if value is not None and there.count(value) != 1:
            raise ValueError(
                f"{name} must be a column of {table!r}, once, to the letter (got {value!r})"
            )
    known: dict[str, Guess] = {}
    if public is not None:
        known = _columns(public, guessed_dialect(public, {}), answers=True)
    columns: dict[str, Guess] = {}
    for name in there:
        single = there.count(name) == 1 and name.strip() and name.isprintable()
        usable = single and not name.startswith("__index_level_")  # as pandas names its index
        columns[name] = known.get(name) or (
            _guess(name, _values(frame, name), dialect) if usable else Guess("text")
        )
    if ids is None:
        named = [name for name, guess in columns.items() if guess.kind == "ids"]
        ids = _ids({name: _values(frame, name) for name in named if name != target})
    return Draft(Path(table).name, dialect, columns, target, ids, public and Path(public).name)


def _ids(columns: Mapping[str, list[Any]]) -> str | None:
    """Returns the column that says whose row it is: one of people, or with the fewest ids, as people have cases."""
    many = {name: len({*values}) for name, values in columns.items()}
    if not many:
        return None

    def place(name: str) -> tuple[bool, bool, int]:
        is_rare = many[name] * 20 < len(columns[name])  # as wards are, and hospitals
        return not any(word in name.lower() for word in _PEOPLE), is_rare, many[name]

    return min(many, key=place)


def _columns(path: str, dialect: Dialect, *, answers: bool) -> dict[str, Guess]:
    """Returns what the columns of a public file look like, with what is in them."""
    frame = opened(path, None, dialect)
    found = {}
    for name in names_of(frame):
        values = _values(frame, name)
        guess = _guess(name, values, dialect)
        found[name] = Guess(guess.kind, guess.format, _answers(guess, values, dialect))
    return found


def _values(frame: Any, name: str) -> list[Any]:
    column = frame[name]
    return list(column if isinstance(frame, Cells) else column.to_pylist())


def _answers(guess: Guess, values: list[Any], dialect: Dialect) -> dict[str, str]:
    """Returns ranges and levels of a PUBLIC column, as text of TOML."""
    if guess.kind == "number":
        found = numbers([dialect.number(value) for value in values])
        known = found[found == found]
        return {"low": toml(float(known.min())), "high": toml(float(known.max()))}
    if guess.kind == "date" and guess.format != OPEN:
        days = [day for day in Date(date.min, date.max, guess.format).days(values) if day == day]
        ends = {"low": min(days), "high": max(days)}
        return {name: toml(date.fromordinal(int(day)).isoformat()) for name, day in ends.items()}
    if guess.kind == "category":
        levels = {key(value): value for value in values if key(value) not in (None, "")}
        return {"levels": toml(sorted(levels.values(), key=lambda level: str(level)))}
    return {}


# -- kinds -------------------------------------------------------------------------------------------------------------


def _guess(name: str, values: Sequence[Any], dialect: Dialect) -> Guess:
    """Returns what a column looks like, by its name and its values."""
    filled = [value for value in values[:_LOOKED_AT] if key(value) != "" and value is not None]
    different = set(map(str, filled))
    words = _words(name)
    is_named = ID_WORDS & {*words} or any(map(_ENDS_IDS.search, words[-1:]))
    is_named = is_named or name.lower() in _PEOPLE
    if is_named and len(different) > _FEW:
        return Guess("ids")
    if not filled:
        return Guess("text")
    if any(isinstance(value, date) for value in filled):
        return Guess("date", "%Y-%m-%d")
    found = numbers([dialect.number(value) for value in filled])
    if (found == found).mean() > _NEARLY:
        return Guess("number" if len(different) > _FEW else "category")
    if form := _format(sorted(different)):
        return Guess("date", form)
    return Guess(
        "category" if len(different) <= min(_MANY, max(_FEW, len(filled) // 4)) else "text"
    )


def _words(name: str) -> list[str]:
    """Returns the words of a name, as of patient_id, patientId and Patient-ID."""
    parts = re.sub(r"(?<=[^\W\d_A-Z])(?=[A-Z])", " ", name)
    return [word.lower() for word in re.findall(r"[^\W\d_]+", parts)]


def _format(texts: Sequence[str]) -> str:
    """Returns how dates are written, "?" where there are two ways to read them, and "" for texts that are none."""
    shares = {}
    for form in (f"{day}{time}" for day in _DAYS for time in _TIMES):
        if _share(texts[:20], form) > 0:
            shares[form] = _share(texts, form)
    best = max(shares.values(), default=0.0)
    if best < _NEARLY:
        return ""
    fitting = [form for form, share in shares.items() if share == best]
    return fitting[0] if len(fitting) == 1 else OPEN


def _share(texts: Sequence[str], form: str) -> float:
    read = 0
    for text in texts:
        with suppress(ValueError):
            datetime.strptime(text.strip(), form)
            read += 1
    return read / max(len(texts), 1)


# -- dialects ----------------------------------------------------------------------------------------------------------


def guessed_dialect(path: str, given: Mapping[str, str]) -> Dialect:
    """Returns the dialect that a file seems to have, but for what is given."""
    if Path(path).suffix.lower() not in TEXT:
        return Dialect(**given)
    Dialect(**{name: sign for name, sign in given.items() if name != "thousands"})  # may raise
    raw = Path(path).read_bytes()
    encoding = given.get("encoding") or _encoding(raw)
    text = raw.decode(encoding, errors="replace").removeprefix("\ufeff")[:_START]
    quote = given.get("quote", '"')
    separator = given.get("separator") or _separator(text, quote)
    rows = list(_rows(text, separator, quote))[1:]
    guessed = _signs([cell for row in rows for cell in row], separator)
    return Dialect(**{**guessed, "separator": separator, "encoding": encoding, **given})


def _encoding(raw: bytes) -> str:
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    for encoding in ("utf-8", "cp1252"):
        with suppress(UnicodeDecodeError):
            raw.decode(encoding)
            return encoding
    return "latin-1"


def _rows(text: str, separator: str, quote: str) -> Iterator[list[str]]:
    """Yields the first rows of a file, as far as they can be read."""
    with suppress(csv.Error):
        yield from Dialect(separator, quote=quote).reader(io.StringIO(text, newline=""))


def _separator(text: str, quote: str) -> str:
    """Returns the separator by which most rows have as many cells as the first one, two or more."""

    def fit(separator: str) -> tuple[int, int]:
        rows = [row for row in _rows(text, separator, quote) if row]
        width = len(rows[0]) if rows else 0
        return (sum(len(row) == width for row in rows), width) if width > 1 else (0, 0)

    best = max((";", "\t", "|", ","), key=fit)
    return best if fit(best)[0] else ","


def _signs(cells: Sequence[str], separator: str) -> dict[str, str]:
    """Returns decimal and thousands, by numbers that can be read in one way only."""

    def count(form: str) -> int:
        return sum(re.fullmatch(form, cell.strip()) is not None for cell in cells)

    sure = r"[+-]?\d*{0}(\d{{1,2}}|\d{{4,}})|[+-]?0{0}\d+|[+-]?\d{{1,3}}({1}\d{{3}})+{0}\d+"
    commas = count(sure.format(",", r"\."))
    points = count(sure.format(r"\.", ","))
    # Excel takes a semicolon where numbers have decimal commas
    decimal = "," if commas > points or (commas == points and separator == ";") else "."
    groups = {
        mark: count(rf"[+-]?\d{{1,3}}({re.escape(mark)}\d{{3}})+({re.escape(decimal)}\d+)?")
        for mark in ALLOWED["thousands"]
        if mark not in ("", decimal)
    }
    most = max(groups, key=lambda mark: groups[mark])
    return {"decimal": decimal, "thousands": most if groups[most] else ""}

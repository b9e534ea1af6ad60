"""What sentences call one unit, and several."""

from __future__ import annotations

PROMISED, KEPT = (
    "promised",
    "kept",
)  # why one row is one unit: somebody says so, or one row of each id was kept


def whose(unit: str, name: str, rows: str = "") -> str:
    """Returns what must hold for one unit to be all that is said to be protected."""
    by_row = unit == "example" and rows != KEPT
    return (
        f"one record per {name}"
        if by_row
        else f"all rows of a {name} carry its id, and no other does"
    )


def rows_of(unit: str, one_row_per_unit: bool, by_ids: bool) -> str:
    """Returns why one row is one named unit; "" where units are users.

    Raises:
        ValueError: not one reason for rows, or one for users.
    """
    if unit != "example":
        if one_row_per_unit or by_ids:
            raise ValueError(
                "one_row_per_unit and by_ids must be left out where users are protected, by"
                " their ids"
            )
        return ""
    # PRIVACY: rows are protected, and a name says more (test_a_row_gets_a_name_by_ids_or_by_a_promise)
    if one_row_per_unit == by_ids:
        raise ValueError(
            "one_row_per_unit must be True if each unit has one row, or by_ids if one row of each"
            f" was kept by its id (got {'both' if by_ids else 'neither'}): a report that protects"
            " rows protects no unit with several"
        )
    return KEPT if by_ids else PROMISED


def names_of(unit: str, plural: str | None) -> tuple[str, str]:
    """Returns the names, fit for a card; the regular plural for None.

    Raises:
        ValueError: a name has other characters than letters, digits, spaces, hyphens and apostrophes, or none.

    Example:
        >>> names_of("company", None)
        ('company', 'companies')
    """
    name = _checked("unit", unit)
    return name, _plural(name) if plural is None else _checked("plural", plural)


def _checked(argument: str, given: str) -> str:
    text = given.strip()
    if not text or not all(letter.isalnum() or letter in " -'" for letter in text):
        raise ValueError(
            f"{argument} must be of letters, digits, spaces, hyphens and apostrophes (got"
            f" {given!r})"
        )
    return text


def _plural(name: str) -> str:
    if name.endswith("y") and name[-2:-1] not in "aeiou":
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith(("s", "x", "ch", "sh")) else f"{name}s"

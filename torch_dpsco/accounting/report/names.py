"""What sentences call one unit, and several."""

from __future__ import annotations


def whose(unit: str, name: str) -> str:
    """Returns what must hold for one unit to be all that is said to be protected."""
    return f"one record per {name}" if unit == "example" else f"all rows of a {name} carry its id, and no other does"


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
        raise ValueError(f"{argument} must be of letters, digits, spaces, hyphens and apostrophes (got {given!r})")
    return text


def _plural(name: str) -> str:
    if name.endswith("y") and name[-2:-1] not in "aeiou":
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith(("s", "x", "ch", "sh")) else f"{name}s"

"""Tables of several seeds as one: mean, least and most."""

from __future__ import annotations

from collections.abc import Sequence

from implicit_attn.studies.tables import Table


def over_seeds(table: Table, same: Sequence[str], measures: Sequence[str]) -> Table:
    """Rows that agree in the columns ``same`` become one, in the order in which they first came.

    Returns:
        The columns ``same``, ``seeds`` (the number of rows), and of each measure its mean under its own
        name, its least value (``_least``) and its most (``_most``). Values that are None are left out; a
        measure without any value is None.

    Raises:
        ValueError: an empty table.
    """
    if not table:
        raise ValueError("table must have at least one row, got none")
    groups: dict[tuple[object, ...], Table] = {}
    for row in table:
        groups.setdefault(tuple(row[name] for name in same), []).append(row)
    merged: Table = []
    for key, rows in groups.items():
        new = {**dict(zip(same, key, strict=True)), "seeds": len(rows)}
        for name in measures:
            values = [row[name] for row in rows if row[name] is not None]
            new[name] = sum(values) / len(values) if values else None
            new[f"{name}_least"] = min(values, default=None)
            new[f"{name}_most"] = max(values, default=None)
        merged.append(new)
    return merged

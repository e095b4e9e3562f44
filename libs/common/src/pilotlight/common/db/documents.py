"""Many rows in one statement: they travel as one JSON document, so a row costs its encoding and no
round trip.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import CTE, Column, Insert, Table, Text, bindparam, cast, func, select, true
from sqlalchemy import insert as insert_into
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.selectable import TableValuedAlias

Row = Mapping[str, object]


def document(rows: Sequence[Row], name: str = "rows") -> dict[str, str]:
    """The parameter of a statement over ``given``."""
    return {name: msgspec.json.encode(rows).decode()}


def columns(table: Table, *names: str) -> list[Column[Any]]:
    """Columns of a document's rows, of the types that they have in a table."""
    return [Column(name, table.c[name].type) for name in names]


def given(*named: Column[Any], document: str = "rows") -> TableValuedAlias:
    """The document's rows, in order; ``document``: its name where there are several."""
    rows = cast(bindparam(document, type_=Text), JSONB)
    valued = func.jsonb_to_recordset(rows).table_valued(*named)
    return valued.render_derived(name="given", with_types=True)


def inserted(
    table: Table,
    names: Sequence[str],
    document: str = "rows",
    *,
    where: CTE | None = None,
    **values: Any,
) -> Insert:
    """Insert the document's rows.

    Args:
        table: Into which.
        names: Columns that rows give.
        document: Its name where there are several.
        where: Of one row or none; where it has none, nothing is inserted, and nothing is before it
            is known.
        values: The same for each row.
    """
    rows = given(*columns(table, *names), document=document)
    selected = select(*(rows.c[name] for name in names), *values.values())
    source = rows if where is None else rows.join(where, true())
    return insert_into(table).from_select([*names, *values], selected.select_from(source))

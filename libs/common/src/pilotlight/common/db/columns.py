"""What tables are made of: their registry, and columns of the kinds that they use."""

from sqlalchemy import BigInteger, Column, DateTime, Double, Identity, MetaData, Text
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "ck": "%(table_name)s_%(constraint_name)s_check",
    }
)


def key(name: str) -> Column[str]:
    """A text that names the row."""
    return Column(name, Text, primary_key=True)


def text(name: str, *, null: bool = False) -> Column[str]:
    """Words."""
    return Column(name, Text, nullable=null)


def count(name: str) -> Column[int]:
    """A whole number."""
    return Column(name, BigInteger, nullable=False)


def time(name: str, *, null: bool = False) -> Column[object]:
    """A moment, in UTC."""
    return Column(name, DateTime(timezone=True), nullable=null)


def seconds(name: str) -> Column[float]:
    """A duration that may be unknown."""
    return Column(name, Double, nullable=True)


def json(name: str) -> Column[object]:
    """A JSON document."""
    return Column(name, JSONB, nullable=False)


def row_id() -> Column[int]:
    """A number that the database gives."""
    return Column("id", BigInteger, Identity(always=True), primary_key=True)

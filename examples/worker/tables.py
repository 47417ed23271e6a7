"""The tables of both columns. None has a unique key on the order: one would hide duplicates."""

from __future__ import annotations

from sqlalchemy import BigInteger, Engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = ["Entry", "PlainCharge", "PlainEntry", "create_tables", "orders_booked"]


class _Base(DeclarativeBase):
    pass


class Entry(_Base):
    """A booking of the shop."""

    __tablename__ = "shop_entries"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    order_id: Mapped[int] = mapped_column(index=True)
    account_id: Mapped[int]
    cents: Mapped[int]


class PlainEntry(_Base):
    """A booking of the plain column."""

    __tablename__ = "plain_entries"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    order_id: Mapped[int] = mapped_column(index=True)
    account_id: Mapped[int]
    cents: Mapped[int]


class PlainCharge(_Base):
    """The plain column's note that an order was charged."""

    __tablename__ = "plain_charges"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    order_id: Mapped[int] = mapped_column(index=True)
    charge_id: Mapped[str]


def create_tables(engine: Engine) -> None:
    _Base.metadata.create_all(engine)


def orders_booked(engine: Engine, table: type[Entry | PlainEntry]) -> list[int]:
    """Return the order of every booking, once per booking."""
    with engine.connect() as connection:
        return list(connection.scalars(select(table.order_id)))

"""The first released schema.

New databases are created from ``db.models``, so this adds only what databases of development versions (revisions 0001
to 0004) may lack. Nullable columns of ``results`` need no migration.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = None

ADDED: tuple[tuple[str, sa.Column[Any]], ...] = (
    ("attempts", sa.Column("recovery", sa.Text(), nullable=True)),
    # Earlier runs trained with what is the default of these keys.
    ("runs", sa.Column("compile", sa.Text(), nullable=False, server_default="off")),
    ("runs", sa.Column("cudnn_benchmark", sa.Boolean(), nullable=False, server_default=sa.false())),
    ("runs", sa.Column("pretrained", sa.Boolean(), nullable=False, server_default=sa.false())),
    ("runs", sa.Column("test_fraction", sa.Double(), nullable=False, server_default="1")),
)


def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    for table, column in ADDED:
        if column.name not in {known["name"] for known in inspector.get_columns(table)}:
            op.add_column(table, column)

"""Why an attempt was sent by recovery, and what it changed; null where people sent it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("recovery", sa.Text(), nullable=True))

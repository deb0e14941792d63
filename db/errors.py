"""Errors of the store. The root of the error tree is in ``workloads.errors``."""

from __future__ import annotations

from workloads.errors import InputError, OperationError


class ForeignStoreError(InputError):
    """The file is not our store, or a newer version wrote it; it was not touched."""


class QueryError(InputError):
    """The statement is not SQL, has a parameter too few or too many, or would write."""


class StoreError(OperationError):
    """The database cannot be used now: busy, no locks, disk full, damaged, unreachable."""


class StoreReadOnlyError(StoreError):
    """The database, its folder or its file system is read-only."""


class StoreDamagedError(StoreError):
    """The file is damaged, or its tables are not those of its revision. The run directories still have everything."""


class StoreSchemaError(StoreDamagedError):
    """A table lacks a column that ``db.models`` declares and no migration adds."""

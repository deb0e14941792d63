"""The store's leaves of the error tree, whose root and picture are in ``workloads.errors``.

InputError
├── ForeignStoreError    the file is not ours, or a newer version wrote it; it is left as it is
└── QueryError           the user's SQL statement cannot be run
OperationError
└── StoreError           the database cannot be used now: busy, no locks, disk full, damaged, unreachable
    ├── StoreReadOnlyError   it can be read but not written
    └── StoreDamagedError    its file is damaged, or its tables are not those of its revision
        └── StoreSchemaError     it lacks a column of the models: a migration was forgotten
"""

from __future__ import annotations

from workloads.errors import InputError, OperationError


class ForeignStoreError(InputError):
    """The file is not our store, or a newer version wrote it; it was not touched."""


class QueryError(InputError):
    """The statement is not SQL, has a parameter too few or too many, or would write."""


class StoreError(OperationError):
    """The database cannot be used now."""


class StoreReadOnlyError(StoreError):
    """The database, its folder or its file system is read-only."""


class StoreDamagedError(StoreError):
    """The file or its tables are damaged. The run directories still have everything."""


class StoreSchemaError(StoreDamagedError):
    """A table lacks a column that ``db.models`` declares and no migration adds."""

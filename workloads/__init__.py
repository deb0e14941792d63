"""What runs in a job on a compute node: contract, launch world, engines, strategies, models, data sets, measurement.

May import neither ``orchestrator`` nor ``db``. Modules that the login side reads (``contract``, ``rundir``,
``registry``, ``errors``, ``provenance`` and the declarations in ``strategies``, ``models`` and ``datasets``) import no
framework at module level.
"""

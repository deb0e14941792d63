"""All that crosses between the login node and a job: Hardware, TrainConfig, RunSpec, RunResult, State.

Standard library only.
"""

from workloads.contract.hardware import Hardware, Topology
from workloads.contract.run_result import RunResult
from workloads.contract.run_spec import EXECUTION_KEYS, SPEC_VERSION, Execution, Expectation, RunSpec
from workloads.contract.state import RANK_LOST, State
from workloads.contract.train_config import IDENTITY_VERSION, INT64, RUN_ID_DIGITS, TrainConfig

__all__ = [
    "EXECUTION_KEYS",
    "Execution",
    "Expectation",
    "Hardware",
    "IDENTITY_VERSION",
    "INT64",
    "RANK_LOST",
    "RUN_ID_DIGITS",
    "RunResult",
    "RunSpec",
    "SPEC_VERSION",
    "State",
    "Topology",
    "TrainConfig",
]

"""All that crosses between the login node and a job: configuration, resources, submission, result, state.

Standard library only.
"""

from workloads.contract.hardware import Hardware, Topology
from workloads.contract.resource_shape import ResourceShape
from workloads.contract.run_result import RunResult, result_fields
from workloads.contract.run_spec import EXECUTION_KEYS, SPEC_VERSION, Execution, Expectation, RunSpec
from workloads.contract.state import RANK_LOST, State
from workloads.contract.submission import RecoveryRecord, Submission
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
    "RecoveryRecord",
    "ResourceShape",
    "RunResult",
    "RunSpec",
    "SPEC_VERSION",
    "State",
    "Submission",
    "Topology",
    "TrainConfig",
    "result_fields",
]

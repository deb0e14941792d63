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

__all__ = ["EXECUTION_KEYS", "IDENTITY_VERSION", "INT64", "RANK_LOST", "RUN_ID_DIGITS", "SPEC_VERSION"]
__all__ += ["Execution", "Expectation", "Hardware", "RecoveryRecord", "ResourceShape", "RunResult", "RunSpec"]
__all__ += ["State", "Submission", "Topology", "TrainConfig", "result_fields"]

"""How a model was cut into parts (balance_applied); the view summary shows it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.execute("DROP VIEW summary")
    # Of runs of before nobody noted it.
    op.add_column("results", sa.Column("balance_applied", sa.Text(), nullable=True))
    op.execute(
        "CREATE VIEW summary AS SELECT r.run_id AS run_id, r.label AS label, r.experiment AS experiment, r.model "
        "AS model, r.dataset AS dataset, r.strategy AS strategy, r.strategy_options AS strategy_options, "
        "r.hardware AS hardware, r.cpus AS cpus, r.seed AS seed, r.repeat AS repeat, r.epochs AS epochs, r.steps "
        "AS steps, r.batch_size AS batch_size, r.optimizer AS optimizer, r.lr AS lr, r.momentum AS momentum, "
        "r.nesterov AS nesterov, r.weight_decay AS weight_decay, r.schedule AS schedule, r.warmup_steps AS "
        "warmup_steps, r.label_smoothing AS label_smoothing, r.precision AS precision, r.channels_last AS "
        "channels_last, r.compile AS compile, r.cudnn_benchmark AS cudnn_benchmark, r.batch_norm AS batch_norm, "
        "r.dropout AS dropout, r.pretrained AS pretrained, r.stem AS stem, r.image_size AS image_size, r.loader "
        "AS loader, r.workers AS workers, r.augment AS augment, r.drop_last AS drop_last, r.train_fraction AS "
        "train_fraction, r.test_fraction AS test_fraction, r.eval_every AS eval_every, (SELECT "
        "min(n.submitted_at) FROM attempts n WHERE n.run_id = r.run_id) AS first_submitted_at, a.attempt AS "
        "attempt, coalesce(a.state, 'planned') AS state, coalesce(a.reason, '') AS reason, coalesce(a.message, "
        "'') AS message, a.target AS target, a.job_id AS job_id, a.submitted_at AS submitted_at, a.started_at AS "
        "started_at, a.ended_at AS ended_at, a.time_limit_s AS time_limit_s, s.attempt AS measured_attempt, "
        "s.diverged AS diverged, s.nonfinite AS nonfinite, s.test_accuracy AS test_accuracy, s.test_loss AS "
        "test_loss, s.train_loss AS train_loss, s.num_test_samples AS num_test_samples, s.num_train_samples AS "
        "num_train_samples, s.train_time_s AS train_time_s, s.epoch_time_s AS epoch_time_s, s.total_time_s AS "
        "total_time_s, s.startup_s AS startup_s, s.warmup_s AS warmup_s, s.compile_s AS compile_s, s.evaluate_s "
        "AS evaluate_s, s.step_time_s AS step_time_s, s.samples_per_s AS samples_per_s, s.starvation_ratio AS "
        "starvation_ratio, s.epochs_done AS epochs_done, s.steps_done AS steps_done, s.resumed_from_epoch AS "
        "resumed_from_epoch, s.allocated_memory_bytes AS allocated_memory_bytes, s.peak_memory_bytes AS "
        "peak_memory_bytes, s.telemetry AS telemetry, s.gpu_utilization_pct AS gpu_utilization_pct, s.gpu_power_w"
        " AS gpu_power_w, s.energy_j AS energy_j, s.gpu_memory_used_bytes AS gpu_memory_used_bytes, s.lr_applied "
        "AS lr_applied, s.balance_applied AS balance_applied, s.num_parameters AS num_parameters, s.world_size AS"
        " world_size, s.device_name AS device_name, s.devices_seen AS devices_seen, s.cpus_seen AS cpus_seen, "
        "s.dataset_digest AS dataset_digest, s.batch_norm_treatment AS batch_norm_treatment, s.code_digest AS "
        "code_digest, s.packages_digest AS packages_digest FROM runs r LEFT JOIN attempts a ON a.run_id = "
        "r.run_id AND a.attempt = (SELECT max(n.attempt) FROM attempts n WHERE n.run_id = r.run_id) LEFT JOIN "
        "results s ON s.run_id = r.run_id AND s.attempt = (SELECT max(n.attempt) FROM results n WHERE n.run_id = "
        "r.run_id AND n.state = 'succeeded')"
    )

"""The first schema: runs, attempts, results, epochs, classes, ranks, ingested; views summary and curves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("experiment", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("dataset", sa.Text(), nullable=False),
        sa.Column("strategy", sa.Text(), nullable=False),
        sa.Column("strategy_options", sa.Text(), nullable=False),
        sa.Column("hardware", sa.Text(), nullable=False),
        sa.Column("cpus", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("repeat", sa.BigInteger(), nullable=False),
        sa.Column("epochs", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=True),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("optimizer", sa.Text(), nullable=False),
        sa.Column("lr", sa.Double(), nullable=False),
        sa.Column("momentum", sa.Double(), nullable=False),
        sa.Column("nesterov", sa.Boolean(), nullable=False),
        sa.Column("weight_decay", sa.Double(), nullable=False),
        sa.Column("schedule", sa.Text(), nullable=False),
        sa.Column("warmup_steps", sa.BigInteger(), nullable=False),
        sa.Column("label_smoothing", sa.Double(), nullable=False),
        sa.Column("precision", sa.Text(), nullable=False),
        sa.Column("channels_last", sa.Boolean(), nullable=False),
        sa.Column("batch_norm", sa.Text(), nullable=False),
        sa.Column("dropout", sa.Double(), nullable=True),
        sa.Column("stem", sa.Text(), nullable=False),
        sa.Column("image_size", sa.BigInteger(), nullable=True),
        sa.Column("loader", sa.Text(), nullable=False),
        sa.Column("workers", sa.BigInteger(), nullable=False),
        sa.Column("augment", sa.Text(), nullable=False),
        sa.Column("drop_last", sa.Boolean(), nullable=False),
        sa.Column("train_fraction", sa.Double(), nullable=False),
        sa.Column("eval_every", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.Text(), nullable=True),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("submitted_at", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Text(), nullable=True),
        sa.Column("ended_at", sa.Text(), nullable=True),
        sa.Column("time_limit_s", sa.BigInteger(), nullable=True),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
        sa.UniqueConstraint("token"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "results",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("diverged", sa.Boolean(), nullable=False),
        sa.Column("nonfinite", sa.Text(), nullable=False),
        sa.Column("test_accuracy", sa.Double(), nullable=True),
        sa.Column("test_loss", sa.Double(), nullable=True),
        sa.Column("train_loss", sa.Double(), nullable=True),
        sa.Column("num_test_samples", sa.BigInteger(), nullable=True),
        sa.Column("num_train_samples", sa.BigInteger(), nullable=True),
        sa.Column("train_time_s", sa.Double(), nullable=True),
        sa.Column("epoch_time_s", sa.Double(), nullable=True),
        sa.Column("total_time_s", sa.Double(), nullable=True),
        sa.Column("startup_s", sa.Double(), nullable=True),
        sa.Column("warmup_s", sa.Double(), nullable=True),
        sa.Column("compile_s", sa.Double(), nullable=True),
        sa.Column("evaluate_s", sa.Double(), nullable=True),
        sa.Column("step_time_s", sa.Double(), nullable=True),
        sa.Column("samples_per_s", sa.Double(), nullable=True),
        sa.Column("starvation_ratio", sa.Double(), nullable=True),
        sa.Column("epochs_done", sa.BigInteger(), nullable=True),
        sa.Column("steps_done", sa.BigInteger(), nullable=True),
        sa.Column("resumed_from_epoch", sa.BigInteger(), nullable=True),
        sa.Column("allocated_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("lr_applied", sa.Double(), nullable=True),
        sa.Column("num_parameters", sa.BigInteger(), nullable=True),
        sa.Column("world_size", sa.BigInteger(), nullable=True),
        sa.Column("device_name", sa.Text(), nullable=True),
        sa.Column("devices_seen", sa.BigInteger(), nullable=True),
        sa.Column("cpus_seen", sa.BigInteger(), nullable=True),
        sa.Column("dataset_digest", sa.Text(), nullable=True),
        sa.Column("batch_norm_treatment", sa.Text(), nullable=True),
        sa.Column("provenance", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Text(), nullable=True),
        sa.Column("ended_at", sa.Text(), nullable=True),
        sa.Column("code_digest", sa.Text(), nullable=True),
        sa.Column("packages_digest", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "attempt"),
        sa.ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "epochs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=True),
        sa.Column("train_loss", sa.Double(), nullable=True),
        sa.Column("test_loss", sa.Double(), nullable=True),
        sa.Column("test_accuracy", sa.Double(), nullable=True),
        sa.Column("epoch_time_s", sa.Double(), nullable=True),
        sa.Column("evaluate_s", sa.Double(), nullable=True),
        sa.Column("samples_per_s", sa.Double(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=True),
        sa.Column("allocated_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("diverged", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "epoch"),
        sa.ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "classes",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("class_index", sa.BigInteger(), nullable=False),
        sa.Column("class_name", sa.Text(), nullable=False),
        sa.Column("precision", sa.Double(), nullable=True),
        sa.Column("recall", sa.Double(), nullable=True),
        sa.Column("f1", sa.Double(), nullable=True),
        sa.Column("support", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "attempt", "class_index"),
        sa.ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "ranks",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("allocated_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "attempt", "rank"),
        sa.ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "ingested",
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("mtime_ns", sa.BigInteger(), nullable=False),
        sa.Column("read_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("path"),
        sqlite_with_rowid=False,
    )
    op.execute(
        "CREATE VIEW summary AS SELECT r.run_id AS run_id, r.label AS label, r.experiment AS experiment, r.model "
        "AS model, r.dataset AS dataset, r.strategy AS strategy, r.strategy_options AS strategy_options, "
        "r.hardware AS hardware, r.cpus AS cpus, r.seed AS seed, r.repeat AS repeat, r.epochs AS epochs, r.steps "
        "AS steps, r.batch_size AS batch_size, r.optimizer AS optimizer, r.lr AS lr, r.momentum AS momentum, "
        "r.nesterov AS nesterov, r.weight_decay AS weight_decay, r.schedule AS schedule, r.warmup_steps AS "
        "warmup_steps, r.label_smoothing AS label_smoothing, r.precision AS precision, r.channels_last AS "
        "channels_last, r.batch_norm AS batch_norm, r.dropout AS dropout, r.stem AS stem, r.image_size AS "
        "image_size, r.loader AS loader, r.workers AS workers, r.augment AS augment, r.drop_last AS drop_last, "
        "r.train_fraction AS train_fraction, r.eval_every AS eval_every, (SELECT min(n.submitted_at) FROM attempts"
        " n WHERE n.run_id = r.run_id) AS first_submitted_at, a.attempt AS attempt, coalesce(a.state, 'planned') "
        "AS state, coalesce(a.reason, '') AS reason, coalesce(a.message, '') AS message, a.target AS target, "
        "a.job_id AS job_id, a.submitted_at AS submitted_at, a.started_at AS started_at, a.ended_at AS ended_at, "
        "a.time_limit_s AS time_limit_s, s.attempt AS measured_attempt, s.diverged AS diverged, s.nonfinite AS "
        "nonfinite, s.test_accuracy AS test_accuracy, s.test_loss AS test_loss, s.train_loss AS train_loss, "
        "s.num_test_samples AS num_test_samples, s.num_train_samples AS num_train_samples, s.train_time_s AS "
        "train_time_s, s.epoch_time_s AS epoch_time_s, s.total_time_s AS total_time_s, s.startup_s AS startup_s, "
        "s.warmup_s AS warmup_s, s.compile_s AS compile_s, s.evaluate_s AS evaluate_s, s.step_time_s AS "
        "step_time_s, s.samples_per_s AS samples_per_s, s.starvation_ratio AS starvation_ratio, s.epochs_done AS "
        "epochs_done, s.steps_done AS steps_done, s.resumed_from_epoch AS resumed_from_epoch, "
        "s.allocated_memory_bytes AS allocated_memory_bytes, s.peak_memory_bytes AS peak_memory_bytes, "
        "s.lr_applied AS lr_applied, s.num_parameters AS num_parameters, s.world_size AS world_size, s.device_name"
        " AS device_name, s.devices_seen AS devices_seen, s.cpus_seen AS cpus_seen, s.dataset_digest AS "
        "dataset_digest, s.batch_norm_treatment AS batch_norm_treatment, s.code_digest AS code_digest, "
        "s.packages_digest AS packages_digest FROM runs r LEFT JOIN attempts a ON a.run_id = r.run_id AND "
        "a.attempt = (SELECT max(n.attempt) FROM attempts n WHERE n.run_id = r.run_id) LEFT JOIN results s ON "
        "s.run_id = r.run_id AND s.attempt = (SELECT max(n.attempt) FROM results n WHERE n.run_id = r.run_id AND "
        "n.state = 'succeeded')"
    )
    op.execute(
        "CREATE VIEW curves AS SELECT e.* FROM epochs e WHERE e.attempt = (SELECT max(n.attempt) FROM epochs n "
        "WHERE n.run_id = e.run_id AND n.epoch = e.epoch)"
    )

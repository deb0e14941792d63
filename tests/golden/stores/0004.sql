BEGIN TRANSACTION;
CREATE TABLE attempts (
	run_id TEXT NOT NULL, 
	attempt BIGINT NOT NULL, 
	token TEXT, 
	target TEXT NOT NULL, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	message TEXT NOT NULL, 
	job_id TEXT, 
	submitted_at TEXT, 
	started_at TEXT, 
	ended_at TEXT, 
	time_limit_s BIGINT, 
	shape TEXT NOT NULL, recovery TEXT, 
	PRIMARY KEY (run_id, attempt), 
	FOREIGN KEY(run_id) REFERENCES runs (run_id), 
	UNIQUE (token)
)
 WITHOUT ROWID

;
INSERT INTO "attempts" VALUES('0b3ddcde334c16f7',1,'7ef5c3751afa1643','local','submitting','','',NULL,'2026-11-29T01:50:47+00:00',NULL,NULL,3600,'{"nodes":1}',NULL);
INSERT INTO "attempts" VALUES('26fff271db33b7b1',1,'token-26fff271db33b7b1-1','local','failed','program_error','boom','1000','2026-01-01T00:00:00+00:00','2026-11-29T01:50:47+00:00',NULL,3600,'{"nodes":1}',NULL);
INSERT INTO "attempts" VALUES('70656a9f0841eaae',1,'token-70656a9f0841eaae-1','local','succeeded','','','1000','2026-01-01T00:00:00+00:00','2026-11-29T01:50:47+00:00',NULL,3600,'{"nodes":1}',NULL);
CREATE TABLE classes (
	run_id TEXT NOT NULL, 
	attempt BIGINT NOT NULL, 
	class_index BIGINT NOT NULL, 
	class_name TEXT NOT NULL, 
	precision DOUBLE, 
	recall DOUBLE, 
	f1 DOUBLE, 
	support BIGINT, 
	PRIMARY KEY (run_id, attempt, class_index), 
	FOREIGN KEY(run_id, attempt) REFERENCES attempts (run_id, attempt)
)
 WITHOUT ROWID

;
INSERT INTO "classes" VALUES('70656a9f0841eaae',1,0,'cat',0.5,0.25,0.333,7);
CREATE TABLE epochs (
	run_id TEXT NOT NULL, 
	attempt BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	steps BIGINT, 
	train_loss DOUBLE, 
	test_loss DOUBLE, 
	test_accuracy DOUBLE, 
	epoch_time_s DOUBLE, 
	evaluate_s DOUBLE, 
	samples_per_s DOUBLE, 
	lr DOUBLE, 
	allocated_memory_bytes BIGINT, 
	peak_memory_bytes BIGINT, 
	diverged BOOLEAN NOT NULL, 
	PRIMARY KEY (run_id, attempt, epoch), 
	FOREIGN KEY(run_id, attempt) REFERENCES attempts (run_id, attempt)
)
 WITHOUT ROWID

;
INSERT INTO "epochs" VALUES('26fff271db33b7b1',1,1,12,1.0,NULL,NULL,1.5,NULL,NULL,NULL,NULL,NULL,0);
INSERT INTO "epochs" VALUES('26fff271db33b7b1',1,2,12,0.5,NULL,NULL,1.5,NULL,NULL,NULL,NULL,NULL,0);
INSERT INTO "epochs" VALUES('70656a9f0841eaae',1,1,12,1.0,NULL,NULL,1.5,NULL,NULL,NULL,NULL,NULL,0);
INSERT INTO "epochs" VALUES('70656a9f0841eaae',1,2,12,0.5,NULL,NULL,1.5,NULL,NULL,NULL,NULL,NULL,0);
CREATE TABLE ingested (
	path TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	mtime_ns BIGINT NOT NULL, 
	read_bytes BIGINT NOT NULL, 
	PRIMARY KEY (path)
)
 WITHOUT ROWID

;
INSERT INTO "ingested" VALUES('/runs/26/26fff271db33b7b1/attempts/1/events.jsonl',350,1795917047210469858,350);
INSERT INTO "ingested" VALUES('/runs/26/26fff271db33b7b1/attempts/1/result.json',1094,1795917047210469858,0);
INSERT INTO "ingested" VALUES('/runs/26/26fff271db33b7b1/attempts/1/submission.json',188,1795917047208286063,0);
INSERT INTO "ingested" VALUES('/runs/26/26fff271db33b7b1/spec.json',1139,1795917047208286063,0);
INSERT INTO "ingested" VALUES('/runs/70/70656a9f0841eaae/attempts/1/events.jsonl',354,1795917047208286063,354);
INSERT INTO "ingested" VALUES('/runs/70/70656a9f0841eaae/attempts/1/result.json',1225,1795917047208286063,0);
INSERT INTO "ingested" VALUES('/runs/70/70656a9f0841eaae/attempts/1/submission.json',188,1795917047204314931,0);
INSERT INTO "ingested" VALUES('/runs/70/70656a9f0841eaae/spec.json',1139,1795917047200314931,0);
CREATE TABLE orchestrate_revision (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT orchestrate_revision_pkc PRIMARY KEY (version_num)
);
INSERT INTO "orchestrate_revision" VALUES('0004');
CREATE TABLE ranks (
	run_id TEXT NOT NULL, 
	attempt BIGINT NOT NULL, 
	rank BIGINT NOT NULL, 
	allocated_memory_bytes BIGINT, 
	peak_memory_bytes BIGINT, 
	PRIMARY KEY (run_id, attempt, rank), 
	FOREIGN KEY(run_id, attempt) REFERENCES attempts (run_id, attempt)
)
 WITHOUT ROWID

;
INSERT INTO "ranks" VALUES('70656a9f0841eaae',1,0,5,6);
CREATE TABLE results (
	run_id TEXT NOT NULL, 
	attempt BIGINT NOT NULL, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	message TEXT NOT NULL, 
	diverged BOOLEAN NOT NULL, 
	nonfinite TEXT NOT NULL, 
	test_accuracy DOUBLE, 
	test_loss DOUBLE, 
	train_loss DOUBLE, 
	num_test_samples BIGINT, 
	num_train_samples BIGINT, 
	train_time_s DOUBLE, 
	epoch_time_s DOUBLE, 
	total_time_s DOUBLE, 
	startup_s DOUBLE, 
	warmup_s DOUBLE, 
	compile_s DOUBLE, 
	evaluate_s DOUBLE, 
	step_time_s DOUBLE, 
	samples_per_s DOUBLE, 
	starvation_ratio DOUBLE, 
	epochs_done BIGINT, 
	steps_done BIGINT, 
	resumed_from_epoch BIGINT, 
	allocated_memory_bytes BIGINT, 
	peak_memory_bytes BIGINT, 
	lr_applied DOUBLE, 
	num_parameters BIGINT, 
	world_size BIGINT, 
	device_name TEXT, 
	devices_seen BIGINT, 
	cpus_seen BIGINT, 
	dataset_digest TEXT, 
	batch_norm_treatment TEXT, 
	provenance TEXT NOT NULL, 
	started_at TEXT, 
	ended_at TEXT, 
	code_digest TEXT, 
	packages_digest TEXT, telemetry TEXT, gpu_utilization_pct DOUBLE, gpu_power_w DOUBLE, energy_j DOUBLE, gpu_memory_used_bytes BIGINT, 
	PRIMARY KEY (run_id, attempt), 
	FOREIGN KEY(run_id, attempt) REFERENCES attempts (run_id, attempt)
)
 WITHOUT ROWID

;
INSERT INTO "results" VALUES('26fff271db33b7b1',1,'failed','program_error','boom',0,'{}',NULL,NULL,NULL,NULL,NULL,NULL,1.5,10.0,NULL,NULL,NULL,NULL,NULL,1000.0,NULL,NULL,NULL,NULL,NULL,1073741824,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'{}',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "results" VALUES('70656a9f0841eaae',1,'succeeded','','',0,'{}',0.9,NULL,NULL,NULL,NULL,NULL,1.5,10.0,NULL,NULL,NULL,NULL,0.01,1000.0,1.01,NULL,NULL,NULL,NULL,1073741824,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'{}',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE runs (
	run_id TEXT NOT NULL, 
	label TEXT NOT NULL, 
	experiment TEXT NOT NULL, 
	model TEXT NOT NULL, 
	dataset TEXT NOT NULL, 
	strategy TEXT NOT NULL, 
	strategy_options TEXT NOT NULL, 
	hardware TEXT NOT NULL, 
	cpus BIGINT NOT NULL, 
	seed BIGINT NOT NULL, 
	repeat BIGINT NOT NULL, 
	epochs BIGINT NOT NULL, 
	steps BIGINT, 
	batch_size BIGINT NOT NULL, 
	optimizer TEXT NOT NULL, 
	lr DOUBLE NOT NULL, 
	momentum DOUBLE NOT NULL, 
	nesterov BOOLEAN NOT NULL, 
	weight_decay DOUBLE NOT NULL, 
	schedule TEXT NOT NULL, 
	warmup_steps BIGINT NOT NULL, 
	label_smoothing DOUBLE NOT NULL, 
	precision TEXT NOT NULL, 
	channels_last BOOLEAN NOT NULL, 
	batch_norm TEXT NOT NULL, 
	dropout DOUBLE, 
	stem TEXT NOT NULL, 
	image_size BIGINT, 
	loader TEXT NOT NULL, 
	workers BIGINT NOT NULL, 
	augment TEXT NOT NULL, 
	drop_last BOOLEAN NOT NULL, 
	train_fraction DOUBLE NOT NULL, 
	eval_every BIGINT NOT NULL, compile TEXT DEFAULT 'off' NOT NULL, cudnn_benchmark BOOLEAN DEFAULT 0 NOT NULL, pretrained BOOLEAN DEFAULT 0 NOT NULL, test_fraction DOUBLE DEFAULT '1' NOT NULL, 
	PRIMARY KEY (run_id)
)
 WITHOUT ROWID

;
INSERT INTO "runs" VALUES('0b3ddcde334c16f7','cnn eager seed=2','study','cnn','digits','eager','{}','cpu:1',1,2,0,10,NULL,128,'sgd',0.05,0.9,0,0.0,'constant',0,0.0,'fp32',0,'batch',NULL,'imagenet',NULL,'resident',0,'none',0,1.0,1,'off',0,0,1.0);
INSERT INTO "runs" VALUES('26fff271db33b7b1','cnn eager seed=1','study','cnn','digits','eager','{}','cpu:1',1,1,0,10,NULL,128,'sgd',0.05,0.9,0,0.0,'constant',0,0.0,'fp32',0,'batch',NULL,'imagenet',NULL,'resident',0,'none',0,1.0,1,'off',0,0,1.0);
INSERT INTO "runs" VALUES('70656a9f0841eaae','cnn eager seed=0','study','cnn','digits','eager','{}','cpu:1',1,0,0,10,NULL,128,'sgd',0.05,0.9,0,0.0,'constant',0,0.0,'fp32',0,'batch',NULL,'imagenet',NULL,'resident',0,'none',0,1.0,1,'off',0,0,1.0);
CREATE VIEW curves AS SELECT e.* FROM epochs e WHERE e.attempt = (SELECT max(n.attempt) FROM epochs n WHERE n.run_id = e.run_id AND n.epoch = e.epoch);
CREATE VIEW summary AS SELECT r.run_id AS run_id, r.label AS label, r.experiment AS experiment, r.model AS model, r.dataset AS dataset, r.strategy AS strategy, r.strategy_options AS strategy_options, r.hardware AS hardware, r.cpus AS cpus, r.seed AS seed, r.repeat AS repeat, r.epochs AS epochs, r.steps AS steps, r.batch_size AS batch_size, r.optimizer AS optimizer, r.lr AS lr, r.momentum AS momentum, r.nesterov AS nesterov, r.weight_decay AS weight_decay, r.schedule AS schedule, r.warmup_steps AS warmup_steps, r.label_smoothing AS label_smoothing, r.precision AS precision, r.channels_last AS channels_last, r.compile AS compile, r.cudnn_benchmark AS cudnn_benchmark, r.batch_norm AS batch_norm, r.dropout AS dropout, r.pretrained AS pretrained, r.stem AS stem, r.image_size AS image_size, r.loader AS loader, r.workers AS workers, r.augment AS augment, r.drop_last AS drop_last, r.train_fraction AS train_fraction, r.test_fraction AS test_fraction, r.eval_every AS eval_every, (SELECT min(n.submitted_at) FROM attempts n WHERE n.run_id = r.run_id) AS first_submitted_at, a.attempt AS attempt, coalesce(a.state, 'planned') AS state, coalesce(a.reason, '') AS reason, coalesce(a.message, '') AS message, a.target AS target, a.job_id AS job_id, a.submitted_at AS submitted_at, a.started_at AS started_at, a.ended_at AS ended_at, a.time_limit_s AS time_limit_s, s.attempt AS measured_attempt, s.diverged AS diverged, s.nonfinite AS nonfinite, s.test_accuracy AS test_accuracy, s.test_loss AS test_loss, s.train_loss AS train_loss, s.num_test_samples AS num_test_samples, s.num_train_samples AS num_train_samples, s.train_time_s AS train_time_s, s.epoch_time_s AS epoch_time_s, s.total_time_s AS total_time_s, s.startup_s AS startup_s, s.warmup_s AS warmup_s, s.compile_s AS compile_s, s.evaluate_s AS evaluate_s, s.step_time_s AS step_time_s, s.samples_per_s AS samples_per_s, s.starvation_ratio AS starvation_ratio, s.epochs_done AS epochs_done, s.steps_done AS steps_done, s.resumed_from_epoch AS resumed_from_epoch, s.allocated_memory_bytes AS allocated_memory_bytes, s.peak_memory_bytes AS peak_memory_bytes, s.telemetry AS telemetry, s.gpu_utilization_pct AS gpu_utilization_pct, s.gpu_power_w AS gpu_power_w, s.energy_j AS energy_j, s.gpu_memory_used_bytes AS gpu_memory_used_bytes, s.lr_applied AS lr_applied, s.num_parameters AS num_parameters, s.world_size AS world_size, s.device_name AS device_name, s.devices_seen AS devices_seen, s.cpus_seen AS cpus_seen, s.dataset_digest AS dataset_digest, s.batch_norm_treatment AS batch_norm_treatment, s.code_digest AS code_digest, s.packages_digest AS packages_digest FROM runs r LEFT JOIN attempts a ON a.run_id = r.run_id AND a.attempt = (SELECT max(n.attempt) FROM attempts n WHERE n.run_id = r.run_id) LEFT JOIN results s ON s.run_id = r.run_id AND s.attempt = (SELECT max(n.attempt) FROM results n WHERE n.run_id = r.run_id AND n.state = 'succeeded');
COMMIT;

-- Argus schema, version 23: whom a rank belongs to, which no process can choose.

ALTER TABLE ranks ADD COLUMN IF NOT EXISTS uid Int64 DEFAULT -1 COMMENT 'User that the process runs as, as its host numbers users; -1: unknown';

ALTER TABLE ranks ADD COLUMN IF NOT EXISTS container String DEFAULT '' COMMENT 'What it runs in: its pod, Slurm''s job or PID namespace; empty: the host, or unknown';

-- A view knows the columns that its table had when it was made.
CREATE OR REPLACE VIEW latest_ranks
AS SELECT * FROM ranks FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'ranks of the run traced last, each row once';

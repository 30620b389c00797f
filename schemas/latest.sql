-- The run traced last, each row once. Every table and view t of which a row belongs to a run has a view latest_t: queries of
-- it need neither a job nor a run nor FINAL, and cannot mix runs. Job and run are looked up first, so that conditions on them
-- choose what is read, as if they stood in the query.

CREATE OR REPLACE VIEW newest_runs
AS SELECT
  n.job AS job, tupleElement(max((n.run, n.last)), 1) AS run, tupleElement(max((n.run, n.last)), 2) AS last
FROM
(
  SELECT job, run, max(ifNull(ended, started)) AS last FROM jobs GROUP BY job, run
  UNION ALL
  SELECT job, run, max(iteration_rollup.last_ts) AS last FROM iteration_rollup GROUP BY job, run
) AS n
GROUP BY n.job
COMMENT 'The newest run of each job: one row per job';

CREATE OR REPLACE VIEW latest_run
AS SELECT job, run FROM newest_runs ORDER BY run DESC, last DESC, job LIMIT 1
COMMENT 'The job and run traced last: one row, which all latest_ views are of';

CREATE OR REPLACE VIEW latest_achieved_flops
AS SELECT * FROM achieved_flops
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'achieved_flops of the run traced last';

CREATE OR REPLACE VIEW latest_baselines
AS SELECT * FROM baselines FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'baselines of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_calls_across
AS SELECT * FROM calls_across
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'calls_across of the run traced last';

CREATE OR REPLACE VIEW latest_calls_aligned
AS SELECT * FROM calls_aligned
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'calls_aligned of the run traced last';

CREATE OR REPLACE VIEW latest_clocks
AS SELECT * FROM clocks FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
  AND version = (SELECT max(version) FROM clocks WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run))
COMMENT 'clocks of the run traced last: the newest estimate';

CREATE OR REPLACE VIEW latest_collective_bandwidth
AS SELECT * FROM collective_bandwidth
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'collective_bandwidth of the run traced last';

CREATE OR REPLACE VIEW latest_collective_waits
AS SELECT * FROM collective_waits
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'collective_waits of the run traced last';

CREATE OR REPLACE VIEW latest_collectives
AS SELECT * FROM collectives
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'collectives of the run traced last';

CREATE OR REPLACE VIEW latest_collectives_across
AS SELECT * FROM collectives_across
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'collectives_across of the run traced last';

CREATE OR REPLACE VIEW latest_collectives_aligned
AS SELECT * FROM collectives_aligned
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'collectives_aligned of the run traced last';

CREATE OR REPLACE VIEW latest_communicator_calls
AS SELECT * FROM communicator_calls
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'communicator_calls of the run traced last';

CREATE OR REPLACE VIEW latest_communicators
AS SELECT * FROM communicators FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'communicators of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_counted_flops
AS SELECT * FROM counted_flops
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'counted_flops of the run traced last';

CREATE OR REPLACE VIEW latest_coverage
AS SELECT * FROM coverage FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'coverage of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_dumped_calls
AS SELECT * FROM dumped_calls
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'dumped_calls of the run traced last';

CREATE OR REPLACE VIEW latest_dumped_groups
AS SELECT * FROM dumped_groups FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'dumped_groups of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_dumps
AS SELECT * FROM dumps FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'dumps of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_environment_changes
AS SELECT * FROM environment_changes
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'environment_changes of the run traced last';

CREATE OR REPLACE VIEW latest_environment_differences
AS SELECT * FROM environment_differences
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'environment_differences of the run traced last';

CREATE OR REPLACE VIEW latest_environment_facts
AS SELECT * FROM environment_facts
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'environment_facts of the run traced last';

CREATE OR REPLACE VIEW latest_environments
AS SELECT * FROM environments FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'environments of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_features
AS SELECT * FROM features FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'features of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_findings
AS SELECT * FROM findings
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
  AND created = (SELECT max(created) FROM findings WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run))
COMMENT 'findings of the run traced last: the newest verdict';

CREATE OR REPLACE VIEW latest_function_patterns
AS SELECT * FROM function_patterns
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'function_patterns of the run traced last';

CREATE OR REPLACE VIEW latest_gc_pauses
AS SELECT * FROM gc_pauses
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'gc_pauses of the run traced last';

CREATE OR REPLACE VIEW latest_gpu_collectives
AS SELECT * FROM gpu_collectives
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'gpu_collectives of the run traced last';

CREATE OR REPLACE VIEW latest_gpu_collectives_across
AS SELECT * FROM gpu_collectives_across
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'gpu_collectives_across of the run traced last';

CREATE OR REPLACE VIEW latest_gpu_host_events
AS SELECT * FROM gpu_host_events
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'gpu_host_events of the run traced last';

CREATE OR REPLACE VIEW latest_gpu_phases
AS SELECT * FROM gpu_phases
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'gpu_phases of the run traced last';

CREATE OR REPLACE VIEW latest_gpu_phases_across
AS SELECT * FROM gpu_phases_across
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'gpu_phases_across of the run traced last';

CREATE OR REPLACE VIEW latest_gpu_steps
AS SELECT * FROM gpu_steps
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'gpu_steps of the run traced last';

CREATE OR REPLACE VIEW latest_gpu_steps_across
AS SELECT * FROM gpu_steps_across
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'gpu_steps_across of the run traced last';

CREATE OR REPLACE VIEW latest_gpu_usage
AS SELECT * FROM gpu_usage
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'gpu_usage of the run traced last';

CREATE OR REPLACE VIEW latest_group_joins
AS SELECT * FROM group_joins FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
  AND version = (SELECT max(version) FROM group_joins WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run))
COMMENT 'group_joins of the run traced last: the newest estimate';

CREATE OR REPLACE VIEW latest_host_usage
AS SELECT * FROM host_usage
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'host_usage of the run traced last';

CREATE OR REPLACE VIEW latest_hot_functions
AS SELECT * FROM hot_functions
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'hot_functions of the run traced last';

CREATE OR REPLACE VIEW latest_hot_lines
AS SELECT * FROM hot_lines
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'hot_lines of the run traced last';

CREATE OR REPLACE VIEW latest_iterations
AS SELECT * FROM iterations
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'iterations of the run traced last';

CREATE OR REPLACE VIEW latest_iterations_across
AS SELECT * FROM iterations_across
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'iterations_across of the run traced last';

CREATE OR REPLACE VIEW latest_jobs
AS SELECT * FROM jobs FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'jobs of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_kernel_events
AS SELECT * FROM kernel_events
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'kernel_events of the run traced last';

CREATE OR REPLACE VIEW latest_kernel_flops
AS SELECT * FROM kernel_flops
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'kernel_flops of the run traced last';

CREATE OR REPLACE VIEW latest_kernel_groups
AS SELECT * FROM kernel_groups FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'kernel_groups of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_kernel_spikes
AS SELECT * FROM kernel_spikes
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'kernel_spikes of the run traced last';

CREATE OR REPLACE VIEW latest_kernel_stats
AS SELECT * FROM kernel_stats
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'kernel_stats of the run traced last';

CREATE OR REPLACE VIEW latest_kernel_times
AS SELECT * FROM kernel_times
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'kernel_times of the run traced last';

CREATE OR REPLACE VIEW latest_kernel_times_across
AS SELECT * FROM kernel_times_across
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'kernel_times_across of the run traced last';

CREATE OR REPLACE VIEW latest_kernels_by_step
AS SELECT * FROM kernels_by_step
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'kernels_by_step of the run traced last';

CREATE OR REPLACE VIEW latest_launches
AS SELECT * FROM launches
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'launches of the run traced last';

CREATE OR REPLACE VIEW latest_launches_by_step
AS SELECT * FROM launches_by_step
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'launches_by_step of the run traced last';

CREATE OR REPLACE VIEW latest_off_cpu_by_reason
AS SELECT * FROM off_cpu_by_reason
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'off_cpu_by_reason of the run traced last';

CREATE OR REPLACE VIEW latest_parallel_groups
AS SELECT * FROM parallel_groups FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'parallel_groups of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_parallel_layout
AS SELECT * FROM parallel_layout FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'parallel_layout of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_phase_ops
AS SELECT * FROM phase_ops
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'phase_ops of the run traced last';

CREATE OR REPLACE VIEW latest_phases
AS SELECT * FROM phases
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'phases of the run traced last';

CREATE OR REPLACE VIEW latest_phases_across
AS SELECT * FROM phases_across
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'phases_across of the run traced last';

CREATE OR REPLACE VIEW latest_ranks
AS SELECT * FROM ranks FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'ranks of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_raw_windows
AS SELECT * FROM raw_windows
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'raw_windows of the run traced last';

CREATE OR REPLACE VIEW latest_signal_coverage
AS SELECT * FROM signal_coverage FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'signal_coverage of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_slow_gpu_phases
AS SELECT * FROM slow_gpu_phases
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'slow_gpu_phases of the run traced last';

CREATE OR REPLACE VIEW latest_slow_phases
AS SELECT * FROM slow_phases
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'slow_phases of the run traced last';

CREATE OR REPLACE VIEW latest_stack_samples
AS SELECT * FROM stack_samples
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'stack_samples of the run traced last';

CREATE OR REPLACE VIEW latest_stack_samples_by_step
AS SELECT * FROM stack_samples_by_step
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'stack_samples_by_step of the run traced last';

CREATE OR REPLACE VIEW latest_stacks
AS SELECT * FROM stacks FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'stacks of the run traced last, each row once';

CREATE OR REPLACE VIEW latest_step_shifts
AS SELECT * FROM step_shifts FINAL
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
  AND version = (SELECT max(version) FROM step_shifts WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run))
COMMENT 'step_shifts of the run traced last: the newest estimate';

CREATE OR REPLACE VIEW latest_step_times
AS SELECT * FROM step_times
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'step_times of the run traced last';

CREATE OR REPLACE VIEW latest_thread_usage
AS SELECT * FROM thread_usage
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'thread_usage of the run traced last';

CREATE OR REPLACE VIEW latest_top_kernels
AS SELECT * FROM top_kernels
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'top_kernels of the run traced last';

CREATE OR REPLACE VIEW latest_utilization
AS SELECT * FROM utilization
WHERE job = (SELECT job FROM latest_run) AND run = (SELECT run FROM latest_run)
COMMENT 'utilization of the run traced last';

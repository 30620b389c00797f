-- Stores before version 29: a type that some lack, and comments in the terms of the field.

-- The first stores of version 27 have names of low cardinality there.
ALTER TABLE environments MODIFY COLUMN facts Map(String, String);

-- Comments, which mean what they did.
ALTER TABLE communicator_calls COMMENT COLUMN comm_rank 'Rank inside the communicator; -1: not known from the call';
ALTER TABLE communicator_calls COMMENT COLUMN nranks 'Size of the communicator; -1: not known from the call';
ALTER TABLE communicator_calls COMMENT COLUMN unique_id 'ncclUniqueId, 256 hexadecimal digits; empty: not known from the call';
ALTER TABLE communicators COMMENT COLUMN joined_by 'How the group was found: unique_id, split, name (reported by the process group), memory (NCCL''s own object names its ranks; how calls line up is inferred from the calls), traffic (guessed from equal call sequences), single';
ALTER TABLE dumps COMMENT COLUMN host 'Node; unknown: the dump does not name it';
ALTER TABLE gpu_host_events COMMENT COLUMN tid 'Thread id; 0: not known from the record';
ALTER TABLE gpu_host_events COMMENT COLUMN duration_ns 'How long it took; 0: a marker; -1: not measured (a module), ts is when it was reported';
ALTER TABLE gpu_phases COMMENT COLUMN method 'How most of it was found: records (the operations themselves), marks (launched in that part of PyTorch), names (of kernels), threads (launched by one that does backward passes only), order (launched between kernels whose phase is known by their names), calls (of the CPU)';
ALTER TABLE health COMMENT COLUMN kind 'Kind of node: GPUs, CPUs and memory, or as the settings name it. Nodes of one kind are peers';
ALTER TABLE jobs COMMENT COLUMN world_size 'Ranks of the whole job as the launcher reports; 0: unknown';
ALTER TABLE jobs COMMENT COLUMN wall_error_ns 'By how much the host''s wall clock may have been off when tracing began, as its kernel reports (adjtimex: maxerror); -1: not known';
ALTER TABLE kernel_flops COMMENT COLUMN operator 'What launched the kernels: PyTorch''s operator (aten::mm, aten::_scaled_dot_product_flash_attention, …), of running jobs cuBLAS''s function or PyTorch''s operator of attention; empty: kernels detected by their names, shapes not known';
ALTER TABLE kernel_groups COMMENT COLUMN grid 'Grid x, y, z; empty: of several grids and blocks that are not distinguished';
ALTER TABLE kernel_groups MODIFY COMMENT 'Kernels, distinguished by name, stream, grid and block. Kept for good: rows of a run that lasts for months refer to them';
ALTER TABLE parallel_groups COMMENT COLUMN why 'What it was inferred from';
ALTER TABLE parallel_layout COMMENT COLUMN source 'What reported it';
ALTER TABLE parallel_layout MODIFY COMMENT 'How a job is split over its ranks, where a recording reports it';
ALTER TABLE phase_ops COMMENT COLUMN microbatch 'Micro-batch; -1: of none, or not known';
ALTER TABLE phase_ops MODIFY COMMENT 'Computations, sends, receives and collectives of each step and rank, where a recording reports them';
ALTER TABLE ranks COMMENT COLUMN rank 'Global rank; numbered in the order of first calls where no launcher variable gives it (see rank_source)';
ALTER TABLE ranks COMMENT COLUMN rank_source 'Whose variable gave the rank: torchrun, openmpi, mvapich, pmi, slurm; order: guessed; parent: a child of the rank''s process; of imported traces: trace, file name';
ALTER TABLE thread_usage MODIFY COMMENT 'What each thread did, exactly, as the kernel reports it about once a second';

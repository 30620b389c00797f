-- Stores before version 26, which is the first of one file a subject: what their tables lack of those of a new store. Whatever
-- such a store lacks is made here; what it has already stays as it is.

-- Columns, and an index, that came later than their table.
ALTER TABLE jobs ADD COLUMN IF NOT EXISTS step_flops Float64 DEFAULT 0 COMMENT 'Floating-point operations of the model in a step, of all ranks, as the user gave them; 0: not given';
ALTER TABLE jobs ADD COLUMN IF NOT EXISTS peak_flops Float64 DEFAULT 0 COMMENT 'Floating-point operations a second that a GPU can do at most, as the user gave them; 0: not given';
ALTER TABLE jobs ADD COLUMN IF NOT EXISTS wall_error_ns Int64 DEFAULT -1 COMMENT 'By how much the host''s wall clock may have been off when tracing began, as its kernel says (adjtimex: maxerror); -1: not known';
ALTER TABLE kernel_flops ADD COLUMN IF NOT EXISTS steps UInt32 DEFAULT 1 COMMENT 'Steps that are summed up here: this one and those that follow; 0: outside every step';
ALTER TABLE ranks ADD COLUMN IF NOT EXISTS uid Int64 DEFAULT -1 COMMENT 'User that the process runs as, as its host numbers users; -1: unknown';
ALTER TABLE ranks ADD COLUMN IF NOT EXISTS container String DEFAULT '' COMMENT 'What it runs in: its pod, Slurm''s job or PID namespace; empty: the host, or unknown';
ALTER TABLE stack_samples ADD INDEX IF NOT EXISTS last_ts_range last_ts TYPE minmax GRANULARITY 1;

-- A retry may come after many other writers' blocks (iterations.sql).
ALTER TABLE iterations MODIFY SETTING non_replicated_deduplication_window = 20000;

-- Codecs hold for what is stored from now on, and for older rows once their parts are merged.
ALTER TABLE collectives MODIFY COLUMN comm CODEC(Delta, ZSTD(1));
ALTER TABLE collectives MODIFY COLUMN seq CODEC(DoubleDelta, ZSTD(1));
ALTER TABLE collectives MODIFY COLUMN bytes CODEC(ZSTD(3));
ALTER TABLE collectives MODIFY COLUMN count CODEC(ZSTD(3));
ALTER TABLE collectives MODIFY COLUMN stream CODEC(ZSTD(3));
ALTER TABLE gpu_collectives MODIFY COLUMN comm CODEC(ZSTD(3));
ALTER TABLE kernel_events MODIFY COLUMN grid CODEC(ZSTD(3));
ALTER TABLE kernel_events MODIFY COLUMN block CODEC(ZSTD(3));
ALTER TABLE kernel_summaries MODIFY COLUMN count_codes CODEC(ZSTD(3));
ALTER TABLE kernel_summaries MODIFY COLUMN mean_codes CODEC(ZSTD(3));
ALTER TABLE launches MODIFY COLUMN shared_bytes CODEC(Delta, ZSTD(1));
ALTER TABLE launches MODIFY COLUMN grid CODEC(ZSTD(3));
ALTER TABLE launches MODIFY COLUMN block CODEC(ZSTD(3));

-- Comments of columns that came to mean more.
ALTER TABLE collectives COMMENT COLUMN comm 'Communicator (NCCL) or process group (PyTorch, gloo) handle in this process; join communicators for the group it belongs to';
ALTER TABLE collectives COMMENT COLUMN op 'AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AlltoAll, Gather, Scatter, Barrier, Send, Recv, GroupStart, GroupEnd';
ALTER TABLE collectives COMMENT COLUMN dtype 'Type of the elements, by its name in NCCL; unknown: not known, nor are bytes; empty: the call has none';
ALTER TABLE communicators COMMENT COLUMN joined_by 'How the group was found: unique_id, split, name (the process group told it), memory (NCCL''s own object told who is in it; how calls line up is concluded from them), traffic (guessed from equal call sequences), single';
ALTER TABLE iterations COMMENT COLUMN method 'How the boundary was found: collectives, launches, marks (end of the optimiser); of imported traces: annotations, repetition';
ALTER TABLE jobs COMMENT COLUMN launcher 'torchrun, openmpi, mvapich, pmi, slurm, kubernetes or unknown; of imported traces: kineto, nsys';
ALTER TABLE kernel_flops COMMENT COLUMN step 'Step in which the kernels were launched, as in iterations, the first of several of a running job; -1: outside every step';
ALTER TABLE kernel_flops COMMENT COLUMN dtype 'Type of the elements of the first factor, or of the query: float, bfloat16, …; empty: not known';
ALTER TABLE kernel_flops COMMENT COLUMN shape 'Of a product m x k x n, of products in a batch b x m x k x n, as the operator has them: cuBLAS''s matrices are by columns, so PyTorch''s n is its m; of attention batch x heads x queries x keys x size of a head, and causal; empty: not known';
ALTER TABLE kernel_flops COMMENT COLUMN flops 'Floating-point operations that these shapes take: 2mkn a product, two products a head of attention forward and five backward, half of it where it is causal; 0: not known';
ALTER TABLE kernel_flops COMMENT COLUMN operator 'What launched the kernels: PyTorch''s operator (aten::mm, aten::_scaled_dot_product_flash_attention, …), of running jobs cuBLAS''s function or PyTorch''s operator of attention; empty: kernels that are such by their names, and nothing tells their shapes';
ALTER TABLE ranks COMMENT COLUMN rank_source 'Whose variable told the rank: torchrun, openmpi, mvapich, pmi, slurm; order: guessed; parent: a child of the rank''s process; of imported traces: trace, file name';
ALTER TABLE ranks COMMENT COLUMN state 'traced, exited or imported';
ALTER TABLE schema_migrations COMMENT COLUMN version 'Version that the tables were brought to';
ALTER TABLE schema_migrations COMMENT COLUMN name 'Argus that did so; up to version 25 the file that was applied';
ALTER TABLE schema_migrations COMMENT COLUMN checksum 'SHA-256 of the statements, comments left out; up to version 25 of the file';
ALTER TABLE schema_migrations COMMENT COLUMN applied 'When it did';
ALTER TABLE schema_migrations MODIFY COMMENT 'Which versions of the tables this store has had';

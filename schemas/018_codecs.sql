-- Argus schema, version 18: codecs that store fewer bytes, as `scripts/bench codecs` measures them (docs/store.md). They hold
-- for what is stored from now on, and for older rows once their parts are merged.

-- The same launches come again in every step: ZSTD(1) does not look back far enough to see it, ZSTD(3) does.
ALTER TABLE launches MODIFY COLUMN shared_bytes CODEC(Delta, ZSTD(1));
ALTER TABLE launches MODIFY COLUMN grid CODEC(ZSTD(3));
ALTER TABLE launches MODIFY COLUMN block CODEC(ZSTD(3));
ALTER TABLE kernel_events MODIFY COLUMN grid CODEC(ZSTD(3));
ALTER TABLE kernel_events MODIFY COLUMN block CODEC(ZSTD(3));

-- Calls of several communicators take turns.
ALTER TABLE collectives MODIFY COLUMN comm CODEC(Delta, ZSTD(1));
ALTER TABLE collectives MODIFY COLUMN seq CODEC(DoubleDelta, ZSTD(1));
ALTER TABLE collectives MODIFY COLUMN bytes CODEC(ZSTD(3));
ALTER TABLE collectives MODIFY COLUMN count CODEC(ZSTD(3));
ALTER TABLE collectives MODIFY COLUMN stream CODEC(ZSTD(3));
ALTER TABLE gpu_collectives MODIFY COLUMN comm CODEC(ZSTD(3));

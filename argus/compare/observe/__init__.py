"""Whether one workload behaves the same when it is repeated: runs it, records what it did, and decides."""

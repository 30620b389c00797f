"""Tables of the store, and the upgrades of older ones."""

"""What a diagnosis reads, once: queries, hosts, peers, what was observed."""

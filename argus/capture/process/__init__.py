"""What is read of a traced process: its files, symbols, names, threads and forks."""

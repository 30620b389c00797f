"""From calls and records to the columns of one table each."""

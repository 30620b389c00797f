"""One ClickHouse, embedded or a server, behind one URL."""

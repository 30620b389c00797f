"""Jobs, recordings and rows made up for tests."""

"""One module for each parser of foreign bytes (``tests.fuzz.harness.Parser`` says what is in it)."""

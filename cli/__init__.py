"""The command line: one file a verb. A verb parses, calls and prints; it holds no logic."""

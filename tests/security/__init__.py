"""What a hostile process, file or folder can do to Argus: one test a finding, each red before it was mended."""

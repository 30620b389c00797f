"""One file for each subject in which two groups of runs can differ (:mod:`argus.compare.comparer`)."""

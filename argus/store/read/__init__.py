"""What people ask of a store: which jobs it holds, their stacks, its state, rows of a statement as text."""

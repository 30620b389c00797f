"""How fast the job would be without a fault."""

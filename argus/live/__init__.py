"""One live session: the tracer, its sides, and the governor that keeps them within the budget."""

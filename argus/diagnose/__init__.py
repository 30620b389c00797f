"""From stored rows to a verdict. Knows nothing of how the rows came to be."""

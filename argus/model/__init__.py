"""What every stage speaks: records, the hooked calls, errors, text and units. Imports no other room."""

"""The diagnosis that runs beside a trace."""

"""What Argus asks of the operating system, and how that is kept from being used against it."""

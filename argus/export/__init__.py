"""What other tools read: profiles, timelines, flame graphs."""

"""Pictures of schedules, drawn from timelines."""

"""What a prepared model remembers, and its variables: checked, named, captured, restored."""

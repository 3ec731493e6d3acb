"""The state of a prepared model, and its variables: checked, named, captured and restored."""

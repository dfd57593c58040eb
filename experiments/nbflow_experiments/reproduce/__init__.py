"""Published tables, measured again: `nbflow reproduce`."""

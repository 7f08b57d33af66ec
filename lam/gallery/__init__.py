"""The items that a run searches among: how images become items, and what is known of each."""

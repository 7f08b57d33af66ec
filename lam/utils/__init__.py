"""Files that are whole or not there, tables, processes, seeds, checks: what every room uses and none owns."""

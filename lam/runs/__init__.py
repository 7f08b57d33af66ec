"""A run as a folder: configuration, data, method, evaluation, report, and what is made of it afterwards."""

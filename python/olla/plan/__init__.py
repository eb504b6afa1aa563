"""Requests and answers as data: options, goals, plans of every kind, their files and tables. No search."""

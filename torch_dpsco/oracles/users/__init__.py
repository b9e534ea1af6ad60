"""Means of users: whole persons with all their rows."""

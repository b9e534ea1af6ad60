"""Means of users, each of them one person with all rows."""

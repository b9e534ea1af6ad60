"""What is public about a table, described once and never read off the private data."""

from torch_dpsco.schema.columns import Category, Number, Ordered
from torch_dpsco.schema.look import Check, Finding
from torch_dpsco.schema.schema import Schema
from torch_dpsco.schema.table import Table

__all__ = ["Category", "Check", "Finding", "Number", "Ordered", "Schema", "Table"]

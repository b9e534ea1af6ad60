"""What is public about a table, described once and never read off the private data."""

from torch_dpsco.schema.columns import Category, Number, Ordered
from torch_dpsco.schema.schema import Schema
from torch_dpsco.schema.table import Table

__all__ = ["Category", "Number", "Ordered", "Schema", "Table"]

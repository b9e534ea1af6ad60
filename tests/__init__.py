"""A package of its own, since diffprivlib installs one of this name: it would hide a folder without this file."""

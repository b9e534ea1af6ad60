"""What was spent, in numbers and in sentences."""

"""What is asked of private models after they are fitted: how good they are."""
